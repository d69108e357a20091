package roles

import "fmt"

// Phase is a part of a request.
type Phase uint8

// The phases.
const (
	Prefill Phase = iota
	Decode
	phases
)

// String returns "prefill" or "decode".
func (p Phase) String() string {
	if p == Prefill {
		return "prefill"
	}
	return "decode"
}

// Role is what a node serves now.
type Role string

// The roles, and the setting that leaves the choice to the node.
const (
	RolePrefill Role = "prefill"
	RoleDecode  Role = "decode"
	RoleBoth    Role = "both"

	Auto = "auto"
)

// Serves reports whether a node with this role takes requests of a phase. An
// unknown role serves both, as a node that says nothing of roles does.
func (r Role) Serves(p Phase) bool {
	switch r {
	case RolePrefill:
		return p == Prefill
	case RoleDecode:
		return p == Decode
	}
	return true
}

// TagAuto is the mesh tag of a node that chooses its role by itself.
const TagAuto = "auto"

// Check reports whether a value of --role is one of prefill, decode, both and
// auto.
func Check(setting string) error {
	switch setting {
	case string(RolePrefill), string(RoleDecode), string(RoleBoth), Auto:
		return nil
	}
	return fmt.Errorf("is not prefill, decode, both or auto")
}
