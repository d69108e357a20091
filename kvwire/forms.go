package kvwire

import (
	"bytes"
	"encoding/json"
	"io"
)

// MaxForms is the most forms of one namespace that a node tells its peers of.
const MaxForms = 32

// AppendFormsRequest appends the body of a forms frame, which asks a peer how
// pages of a namespace may be laid out: the 32 bytes of the namespace.
func AppendFormsRequest(b []byte, ns Namespace) []byte { return append(b, ns[:]...) }

// ParseFormsRequest decodes the message.
func ParseFormsRequest(body []byte) (Namespace, error) {
	d := decoder{b: body}
	var ns Namespace
	copy(ns[:], d.bytes(NamespaceSize))
	return ns, d.end("forms")
}

// formsAnswer is the body of the answer to a forms frame (JSON).
type formsAnswer struct {
	// Descriptors has one of each form: that of any of its shards.
	Descriptors []Descriptor `json:"descriptors"`
}

// AppendForms appends the answer to a forms frame (JSON): a descriptor of each
// form, that of any of its shards. What is above [MaxForms] or does not fit into
// [MaxJSON] is left out.
func AppendForms(b []byte, ds []Descriptor) ([]byte, error) {
	ds = ds[:min(len(ds), MaxForms)]
	for ; ; ds = ds[:len(ds)-1] {
		body, err := json.Marshal(formsAnswer{append([]Descriptor{}, ds...)})
		if err != nil {
			return b, err
		}
		if len(body) <= MaxJSON {
			return append(b, body...), nil
		}
	}
}

// ParseForms decodes the answer to a forms frame. Whoever knows the namespace's
// model validates the descriptors; here they are checked as far as that needs no
// model, so that their forms can be compared.
func ParseForms(body []byte) ([]Descriptor, error) {
	if len(body) > MaxJSON {
		return nil, Errorf(CodeTooLarge, "forms", "%d bytes are more than %d", len(body), MaxJSON)
	}
	var a formsAnswer
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&a); err != nil {
		return nil, Errorf(CodeBadFrame, "forms", "%v", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, Errorf(CodeBadFrame, "forms", "something follows the JSON object")
	}
	if len(a.Descriptors) > MaxForms {
		return nil, Errorf(CodeTooLarge, "forms", "%d descriptors are more than %d", len(a.Descriptors), MaxForms)
	}
	for _, d := range a.Descriptors {
		if err := d.check(); err != nil {
			return nil, err
		}
	}
	return a.Descriptors, nil
}
