package peers

import (
	"encoding/binary"
	"fmt"

	"membrane/kvwire"
)

const (
	// pageTokens is the page size of the sidecars that are measured.
	pageTokens = 16
	// chainPages is how many pages a prompt of the benchmark has: keys follow
	// each other along prompts, so a batch is a run within one.
	chainPages = 64
	// most handles that a connection keeps before it drops them all.
	maxHandles = 1024

	engineDeadlineUS = 10e6
	engineLeaseMS    = 10_000
)

// prompt returns the token ids of a chain in wire form.
func prompt(chain int) []byte {
	b := make([]byte, 0, 4*chainPages*pageTokens)
	b = binary.LittleEndian.AppendUint32(b, uint32(chain)+1)
	for i := 1; i < chainPages*pageTokens; i++ {
		b = binary.LittleEndian.AppendUint32(b, uint32(i))
	}
	return b
}

// hashes returns the content hashes of a chain's pages.
func hashes(chain int) ([]kvwire.Hash, error) {
	c, err := kvwire.NewChain(pageTokens, kvwire.Scope{})
	if err != nil {
		return nil, err
	}
	if err := c.AppendWire(prompt(chain)); err != nil {
		return nil, err
	}
	return c.Hashes(), nil
}

// registration says what an engine with values of the given size is.
func registration(name string, size, slots int, inline bool) kvwire.Register {
	return kvwire.Register{
		Engine: name, Role: kvwire.RoleBoth, InboxSlots: slots, Inline: inline, Model: facts(size), Descriptor: descriptor(size),
	}
}

func facts(size int) kvwire.ModelFacts {
	return kvwire.ModelFacts{WeightsID: fmt.Sprintf("bench-peers-%d", size), DType: "uint8", RoPE: "none", Layers: 1, KVHeads: 1, HeadSize: 1}
}

func descriptor(size int) kvwire.Descriptor {
	return kvwire.Descriptor{
		Layout: "bytes", DType: "uint8", BlockTokens: pageTokens, BlockBytes: int64(size),
		TPSize: 1, PPSize: 1, Layers: [2]int{0, 1}, Heads: [2]int{0, 1},
	}
}
