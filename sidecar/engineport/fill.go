package engineport

import (
	"context"

	"membrane/kvwire"
	"membrane/mesh"
)

// FillRequest names pages that are missing here, in the order of the prompt.
type FillRequest = mesh.FillRequest

// Filler gets missing pages from other nodes. Fill returns how many of the
// leading pages are in the space now and why the next one is not. It returns
// at its context's deadline at the latest.
type Filler interface {
	Fill(ctx context.Context, r FillRequest) (pages int, why kvwire.Reason)
}

// PeerForms knows in which forms other nodes may hold pages of a namespace.
type PeerForms interface {
	Forms(ctx context.Context, ns kvwire.Namespace) []kvwire.Descriptor
}

var (
	_ Filler    = (*mesh.Mesh)(nil)
	_ PeerForms = (*mesh.Mesh)(nil)
)
