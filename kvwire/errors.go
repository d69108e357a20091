package kvwire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Code classifies an error frame. Numbers travel on the wire and are never
// reused.
type Code uint16

// The codes.
const (
	// CodeInternal: the other side failed; the request may be tried again.
	CodeInternal Code = 1
	// CodeBadFrame: the bytes are not a frame of this protocol. The connection
	// is closed after it.
	CodeBadFrame Code = 2
	// CodeVersion: the frame's version is not spoken here. The message names
	// the versions that are.
	CodeVersion Code = 3
	// CodeTooLarge: a declared length is above its limit.
	CodeTooLarge Code = 4
	// CodeBadField: a field has a value that is not allowed.
	CodeBadField Code = 5
	// CodeUnauthorized: no credential, a wrong one, or one without the scope.
	CodeUnauthorized Code = 6
	// CodeNotRegistered: the message needs a registered connection.
	CodeNotRegistered Code = 7
	// CodeRankTaken: another live connection has this engine, role and rank.
	CodeRankTaken Code = 8
	// CodeUnknownHandle: the chain handle was never given out, was dropped, or
	// belongs to another engine.
	CodeUnknownHandle Code = 9
	// CodeUnknownLease: the lease was never given out or belongs to another
	// engine.
	CodeUnknownLease Code = 10
	// CodeDoubleRelease: this rank has released the lease before.
	CodeDoubleRelease Code = 11
	// CodeNotReserved: the inbox slot is not reserved for this page.
	CodeNotReserved Code = 12
	// CodeDraining: the sidecar is stopping and takes no new work.
	CodeDraining Code = 13
	// CodeUnknownNamespace: no such namespace is known here.
	CodeUnknownNamespace Code = 14
	// CodeBusy: a per-connection cap is reached.
	CodeBusy Code = 15
)

var codeNames = map[Code]string{
	CodeInternal: "internal", CodeBadFrame: "bad_frame", CodeVersion: "version", CodeTooLarge: "too_large",
	CodeBadField: "bad_field", CodeUnauthorized: "unauthorized", CodeNotRegistered: "not_registered",
	CodeRankTaken: "rank_taken", CodeUnknownHandle: "unknown_handle", CodeUnknownLease: "unknown_lease",
	CodeDoubleRelease: "double_release", CodeNotReserved: "not_reserved", CodeDraining: "draining",
	CodeUnknownNamespace: "unknown_namespace", CodeBusy: "busy",
}

// String returns the code's stable name.
func (c Code) String() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return fmt.Sprintf("code(%d)", uint16(c))
}

// Error is what an error frame carries: a code, the field at fault (may be
// empty) and a sentence for a person.
type Error struct {
	Code    Code
	Field   string
	Message string
}

// Errorf returns an [*Error] with a formatted message.
func Errorf(code Code, field, format string, args ...any) *Error {
	return &Error{Code: code, Field: field, Message: fmt.Sprintf(format, args...)}
}

// Error returns "code: field: message".
func (e *Error) Error() string {
	if e.Field == "" {
		return e.Code.String() + ": " + e.Message
	}
	return e.Code.String() + ": " + e.Field + ": " + e.Message
}

// CodeOf returns the code of the first [*Error] in err's chain, or 0.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

const (
	maxErrorField   = 256
	maxErrorMessage = 4096
)

// AppendError appends the body of an error frame for err. An error that is not
// an [*Error] becomes [CodeInternal] with its text.
func AppendError(b []byte, err error) []byte {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{Code: CodeInternal, Message: err.Error()}
	}
	field, message := truncate(e.Field, maxErrorField), truncate(e.Message, maxErrorMessage)
	b = binary.LittleEndian.AppendUint16(b, uint16(e.Code))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(field)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(message)))
	b = append(b, field...)
	return append(b, message...)
}

func truncate(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}

// ParseError decodes the body of an error frame.
func ParseError(body []byte) (*Error, error) {
	d := decoder{b: body}
	e := &Error{Code: Code(d.u16())}
	nf, nm := int(d.u16()), int(d.u16())
	if nf > maxErrorField || nm > maxErrorMessage {
		return nil, Errorf(CodeTooLarge, "error", "field of %d and message of %d bytes", nf, nm)
	}
	e.Field, e.Message = string(d.bytes(nf)), string(d.bytes(nm))
	return e, d.end("error")
}
