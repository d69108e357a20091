package resp

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// Of rueidis: background tasks that end some time after its client.
		goleak.IgnoreTopFunction("github.com/redis/rueidis.(*pipe)._background"))
}
