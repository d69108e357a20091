package disagg

import (
	"errors"
	"fmt"
	"time"

	"membrane/kvwire"
	"membrane/sidecar/roles"
)

// Kind says what a caller can do about an error. Listeners turn it into a
// status of theirs.
type Kind uint8

// The kinds.
const (
	// Malformed: the request must be changed (400, INVALID_ARGUMENT).
	Malformed Kind = iota + 1
	// NotFound: no reachable node knows the handle for this tenant, or it has
	// expired (404, NOT_FOUND).
	NotFound
	// WrongRole: another node serves this phase (409, FAILED_PRECONDITION).
	WrongRole
	// Busy: try again after a while (503, UNAVAILABLE).
	Busy
	// Late: the deadline passed before the first token (504,
	// DEADLINE_EXCEEDED).
	Late
	// TooLarge: a bundle has too many bytes (413).
	TooLarge
	// Gone: the caller has gone away, so that nobody reads this (499,
	// CANCELLED).
	Gone
)

// Error is an error that the caller can do something about.
type Error struct {
	Kind    Kind
	Field   string // of the request, "" if no single one is at fault
	Message string
	// Name is the stable name of the error where the kind's is not precise
	// enough; see [Error.Code].
	Name string
	// RetryAfter is set when Busy.
	RetryAfter time.Duration
}

// Error returns the field and the message.
func (e *Error) Error() string {
	if e.Field == "" {
		return e.Message
	}
	return e.Field + ": " + e.Message
}

var kindNames = map[Kind]string{
	Malformed: "bad_request", NotFound: "not_found", WrongRole: "wrong_role", Busy: "busy", Late: "deadline",
	TooLarge: "too_large", Gone: "cancelled",
}

// Code returns the error's stable name, such as "not_found".
func (e *Error) Code() string {
	if e.Name != "" {
		return e.Name
	}
	return kindNames[e.Kind]
}

func malformed(field, format string, args ...any) *Error {
	return &Error{Kind: Malformed, Field: field, Message: fmt.Sprintf(format, args...)}
}

func busy(after time.Duration, format string, args ...any) *Error {
	return &Error{Kind: Busy, Message: fmt.Sprintf(format, args...), RetryAfter: after}
}

// known turns the errors of other packages into an [*Error] where the caller
// can do something about them.
func known(err error) error {
	var role *roles.NotServedError
	if errors.As(err, &role) {
		return &Error{Kind: WrongRole, Message: role.Error()}
	}
	var e *kvwire.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case kvwire.CodeBadField, kvwire.CodeTooLarge:
		return malformed(e.Field, "%s", e.Message)
	case kvwire.CodeBusy, kvwire.CodeDraining:
		return busy(time.Second, "%s", e.Message)
	}
	return err
}
