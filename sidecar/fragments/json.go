package fragments

import (
	"encoding/json"
	"strconv"
)

// AppendJSON appends what [json.Marshal] makes of r, without reflection: the
// answer to a look-up is the hot path of the fragment API. TTL and ReuseScore
// must be finite.
func (r *Retrieved) AppendJSON(b []byte) []byte {
	b = append(b, `{"found":`...)
	b = strconv.AppendBool(b, r.Found)
	b = append(b, `,"fragment":`...)
	if r.Fragment == nil {
		b = append(b, "null"...)
	} else {
		b = r.Fragment.appendJSON(b)
	}
	if r.Corrupt {
		b = append(b, `,"corrupt":true`...)
	}
	if r.PayloadHash != "" {
		b = appendText(b, `,"payload_hash":`, r.PayloadHash)
	}
	return append(b, '}')
}

func (f *Fragment) appendJSON(b []byte) []byte {
	b = appendInt(b, `{"schema_version":`, f.SchemaVersion)
	b = appendText(b, `,"tenant_id":`, f.Tenant)
	b = append(b, `,"identity":`...)
	b = f.Identity.appendJSON(b)
	b = appendText(b, `,"payload_ref":`, f.PayloadRef)
	b = appendInt(b, `,"payload_size":`, f.PayloadSize)
	b = appendFloat(b, `,"ttl":`, f.TTL)
	b = appendFloat(b, `,"reuse_score":`, f.ReuseScore)
	b = appendInt(b, `,"version_id":`, f.VersionID)
	b = appendText(b, `,"consistency":`, f.Consistency)
	b = appendInt(b, `,"hlc":`, f.HLC)
	b = appendText(b, `,"fingerprint_compat":`, f.Compat)
	return append(b, '}')
}

func (i *Identity) appendJSON(b []byte) []byte {
	b = appendText(b, `{"payload_hash":`, i.PayloadHash)
	b = appendText(b, `,"model_id":`, i.ModelID)
	b = appendText(b, `,"model_revision":`, i.ModelRevision)
	b = appendText(b, `,"tokenizer_name":`, i.TokenizerName)
	b = appendText(b, `,"tokenizer_revision":`, i.TokenizerRevision)
	b = appendInts(b, `,"layer_range":`, i.LayerRange[:])
	b = appendInts(b, `,"head_range":`, i.HeadRange[:])
	b = appendInts(b, `,"token_span":`, i.TokenSpan[:])
	b = appendText(b, `,"dtype":`, i.DType)
	b = appendInts(b, `,"shape":`, i.Shape)
	return append(b, '}')
}

func appendText(b []byte, name, s string) []byte {
	b = append(b, name...)
	for _, c := range []byte(s) {
		if c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			quoted, _ := json.Marshal(s) // a string never fails
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

func appendInt[I int | int64](b []byte, name string, n I) []byte {
	return strconv.AppendInt(append(b, name...), int64(n), 10)
}

func appendFloat(b []byte, name string, f float64) []byte {
	b = append(b, name...)
	if n := int64(f); f == float64(n) && n > -1e15 && n < 1e15 && (n != 0 || 1/f > 0) {
		return strconv.AppendInt(b, n, 10)
	}
	text, _ := json.Marshal(f) // what is not finite has no text
	return append(b, text...)
}

func appendInts(b []byte, name string, list []int) []byte {
	b = append(b, name...)
	if list == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i, n := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return append(b, ']')
}
