package kvwire

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func someDescriptors(n int) []Descriptor {
	all := make([]Descriptor, n)
	for i := range all {
		all[i] = Descriptor{
			Layout: fmt.Sprint("layout-", i), DType: "bfloat16", BlockTokens: 16, BlockBytes: 4096, TPSize: 2, PPSize: 1,
			Axes: []string{"layer", "token"}, Strides: []int64{64, 2}, Layers: [2]int{0, 4}, Heads: [2]int{0, 2},
			Scales: []ScaleArray{{Per: PerHead, DType: "float32"}},
		}
	}
	return all
}

func TestFormsTravel(t *testing.T) {
	ns := Namespace{1, 2, 3}
	got, err := ParseFormsRequest(AppendFormsRequest(nil, ns))
	require.NoError(t, err)
	assert.Equal(t, ns, got)
	_, err = ParseFormsRequest(AppendFormsRequest(nil, ns)[1:])
	assert.Equal(t, CodeBadFrame, CodeOf(err))
	_, err = ParseFormsRequest(append(AppendFormsRequest(nil, ns), 0))
	assert.Equal(t, CodeBadFrame, CodeOf(err))

	for _, n := range []int{0, 1, MaxForms} {
		b, err := AppendForms(nil, someDescriptors(n))
		require.NoError(t, err)
		ds, err := ParseForms(b)
		require.NoError(t, err)
		assert.Equal(t, someDescriptors(n), ds)
	}
}

func TestFormsHaveLimits(t *testing.T) {
	b, err := AppendForms(nil, someDescriptors(MaxForms+5))
	require.NoError(t, err)
	ds, err := ParseForms(b)
	require.NoError(t, err)
	assert.Len(t, ds, MaxForms)

	large := someDescriptors(4)
	for i := range large {
		large[i].Layout = strings.Repeat("l", MaxJSON/3)
	}
	b, err = AppendForms(nil, large)
	require.NoError(t, err)
	assert.LessOrEqual(t, len(b), MaxJSON)
	assert.Equal(t, 2, bytes.Count(b, []byte(`"layout"`)))

	const least = `{"layout":"l","dtype":"d","block_tokens":1,"block_bytes":1,"tp_size":1,"pp_size":1}`
	body := func(n int) []byte {
		return []byte(`{"descriptors":[` + strings.TrimSuffix(strings.Repeat(least+`,`, n), ",") + `]}`)
	}
	_, err = ParseForms(body(MaxForms))
	assert.NoError(t, err)
	_, err = ParseForms(body(MaxForms + 1))
	assert.Equal(t, CodeTooLarge, CodeOf(err))
	_, err = ParseForms(append(body(1), bytes.Repeat([]byte(" "), MaxJSON-len(body(1)))...))
	assert.NoError(t, err)
	_, err = ParseForms(append(body(1), bytes.Repeat([]byte(" "), MaxJSON-len(body(1))+1)...))
	assert.Equal(t, CodeTooLarge, CodeOf(err))
	for _, bad := range []string{``, `{}{}`, `[]`, `{"descriptors":[{"unknown":1}]}`, `{"more":1}`, `{"descriptors":[{"tp_size":"2"}]}`} {
		_, err := ParseForms([]byte(bad))
		assert.Equal(t, CodeBadFrame, CodeOf(err), bad)
	}
	for _, bad := range []string{`{}`, strings.Replace(least, `}`, `,"axes":["a"]}`, 1), strings.Replace(least, `}`, `,"scales":[{"per":"head","dtype":"d","axes":["a"]}]}`, 1), strings.Replace(least, `"tp_size":1`, `"tp_size":0`, 1)} {
		_, err := ParseForms([]byte(`{"descriptors":[` + bad + `]}`))
		assert.Equal(t, CodeBadField, CodeOf(err), "%s: what a peer says is asked for its form and shard", bad)
	}
}

func FuzzForms(f *testing.F) {
	for _, n := range []int{0, 1, 3} {
		b, _ := AppendForms(nil, someDescriptors(n))
		f.Add(b)
	}
	f.Add([]byte(`{"descriptors":[{"axes":["a"],"strides":[-1]}]}`))
	f.Add([]byte(`{"descriptors":[{"layout":"l","dtype":"d","block_tokens":10,"block_bytes":1000,"tp_size":1,"pp_size":1,"axes":["a"]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		ds, err := ParseForms(b)
		if err != nil {
			return
		}
		again, err := AppendForms(nil, ds)
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParseForms(again)
		if err != nil || len(back) > len(ds) {
			t.Fatalf("%d descriptors, then %d: %v", len(ds), len(back), err)
		}
		for i := range back {
			if back[i].Form() != ds[i].Form() {
				t.Fatalf("%+v is read as %+v", ds[i], back[i])
			}
		}
	})
}
