package resp

import "time"

// Limits on what clients may ask for.
const (
	// MaxConnections is the most connections at a time, MaxFromOne the most of
	// them from one address.
	MaxConnections = 1024
	MaxFromOne     = MaxConnections / 2
	// MaxArgs is the most arguments of one command, its name included, and
	// MaxArgBytes the most bytes of them that are no values.
	MaxArgs     = 1 << 16
	MaxArgBytes = 4 << 20
	// MaxKey is the longest key, in bytes.
	MaxKey = 4096
	// MaxArg is the longest argument that is neither key nor value, in bytes.
	MaxArg = 64 << 10
	// MaxInline is the longest inline command, in bytes, its end of line
	// included. It must fit into the buffer of a connection.
	MaxInline = readBuffer
	// MaxSkip is the longest argument that is read only to be thrown away, so
	// that the connection can go on after the error. A longer one closes it.
	MaxSkip = 1 << 30
	// MaxKeys is the most keys that KEYS lists.
	MaxKeys = 10_000

	// What those may send who have not said who they are.
	maxStrangers    = 64 // connections; beyond it the oldest makes room
	maxStrangerArgs = 16
	maxStrangerArg  = 512
	maxWrongKeys    = 8 // before the connection is closed

	readBuffer  = 16 << 10
	writeBuffer = 8 << 10
	// copyBelow is up to which length a value is copied into the buffer of
	// replies: cheaper than an element of a vector and a view of its own.
	copyBelow = 1 << 10
	// maxViews and maxPending bound the values that wait to be written in one
	// go, in number and in bytes. One value may be longer.
	maxViews   = 64
	maxPending = 4 << 20
	// keepMemory is the most that a connection keeps of the memory for
	// arguments between commands.
	keepMemory = 16 << 10

	greetTimeout = 10 * time.Second
	// stallTimeout is how long the rest of a command may be on its way, beside
	// the time for its values.
	stallTimeout = 30 * time.Second
	writeTimeout = 10 * time.Second
	roomTimeout  = 100 * time.Millisecond // the wait for others to receive
)
