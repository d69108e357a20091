package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
)

// fixedPorts returns loopback ports that are free now and that the kernel
// gives to nobody who asks for any: a process that starts again finds its own
// port free.
func fixedPorts(n int) ([]int, error) {
	const low, high = 20000, 32000 // below the usual ephemeral ports (ip(7), ip_local_port_range)
	var held []net.Listener
	defer func() {
		for _, l := range held {
			_ = l.Close()
		}
	}()
	var ports []int
	var last error
	for range 1000 {
		if len(ports) == n {
			return ports, nil
		}
		port := low + rand.IntN(high-low)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			last = err
			continue
		}
		held, ports = append(held, l), append(ports, port)
	}
	return nil, errors.Join(fmt.Errorf("cannot find %d free ports from %d to %d", n, low, high), last)
}
