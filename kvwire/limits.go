package kvwire

// Limits on everything that a socket or a file can declare. A length above its
// limit is refused before anything is allocated for it.
const (
	// MaxTenant is the longest tenant name, in bytes.
	MaxTenant = 128
	// MaxID is the longest engine id, node id or client name, in bytes.
	MaxID = 128
	// MaxSalt is the longest cache salt or extra key, in bytes.
	MaxSalt = 4096
	// MaxTokens is the most token ids in one chain (a prompt and its output).
	MaxTokens = 1 << 20
	// MinPageTokens and MaxPageTokens bound the tokens in one page.
	MinPageTokens = 1
	MaxPageTokens = 1 << 14
	// MaxShards is the most shards that a page may have (TP × PP ranks).
	MaxShards = 512
	// MaxObject is the largest object, in bytes.
	MaxObject = 256 << 20
	// MaxBatch is the most pages in one lease, reserve, commit or batch read.
	MaxBatch = 1 << 16
	// MaxControl is the longest frame body that carries no page, in bytes.
	MaxControl = 8 << 20
	// MaxJSON is the longest JSON body of a control message, in bytes.
	MaxJSON = 64 << 10
)
