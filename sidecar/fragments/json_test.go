package fragments

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestJSONIsWhatEncodingJSONWrites(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		pair := func(name string) [2]int { return [2]int{rapid.Int().Draw(r, name), rapid.Int().Draw(r, name)} }
		text := rapid.OneOf(rapid.StringMatching(`[ -~]{0,20}`), rapid.String())
		answer := Retrieved{Found: rapid.Bool().Draw(r, "found"), Corrupt: rapid.Bool().Draw(r, "corrupt"), PayloadHash: text.Draw(r, "hash")}
		if rapid.Bool().Draw(r, "fragment") {
			answer.Fragment = &Fragment{
				SchemaVersion: rapid.Int().Draw(r, "schema"), Tenant: text.Draw(r, "tenant"), PayloadRef: text.Draw(r, "ref"),
				PayloadSize: rapid.Int64().Draw(r, "size"), TTL: rapid.Float64().Draw(r, "ttl"), ReuseScore: float64(rapid.Int16().Draw(r, "score")),
				VersionID: rapid.Int().Draw(r, "version"), Consistency: text.Draw(r, "consistency"), HLC: rapid.Int64().Draw(r, "hlc"), Compat: text.Draw(r, "compat"),
				Identity: Identity{
					PayloadHash: text.Draw(r, "payload"), ModelID: text.Draw(r, "model"), ModelRevision: text.Draw(r, "revision"),
					TokenizerName: text.Draw(r, "tokenizer"), TokenizerRevision: text.Draw(r, "tokenizer revision"),
					LayerRange: pair("layers"), HeadRange: pair("heads"), TokenSpan: pair("tokens"), DType: text.Draw(r, "dtype"),
					Shape: rapid.OneOf(rapid.Just([]int(nil)), rapid.SliceOf(rapid.Int())).Draw(r, "shape"),
				},
			}
		}
		want, err := json.Marshal(answer)
		require.NoError(r, err)
		require.Equal(r, string(want), string(answer.AppendJSON(nil)))
	})
}
