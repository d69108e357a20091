package sidecar

import (
	"fmt"
	"net"

	"membrane/sidecar/lm"
)

// listenLM opens the port for LMCache's lm:// clients, if one is asked for.
func (n *Sidecar) listenLM() error {
	addr := n.settings.LMAddr
	if addr == "" {
		return nil
	}
	var err error
	if n.lmTCP, err = net.Listen("tcp", addr); err != nil {
		return &SettingError{"lm-addr", addr, fmt.Sprintf("cannot listen there: %v", err)}
	}
	n.onClose(n.lmTCP.Close)
	return nil
}

func (n *Sidecar) openLM() error {
	if n.lmTCP == nil {
		return nil
	}
	if n.settings.APIKeyFile != "" {
		n.log.Warn().Str("lm", n.lmTCP.Addr().String()).Str("tenant", n.settings.EngineTenant).
			Msg("clients of --lm-addr show no credential: whoever reaches it has this tenant's values")
	}
	var err error
	n.lm, err = lm.New(lm.Config{Cache: n.cache, Tenant: n.settings.EngineTenant, Metrics: n.set, Log: n.log})
	if err != nil {
		return err
	}
	n.onClose(n.lm.Close)
	return nil
}

func (n *Sidecar) serveLM() error {
	if n.lm == nil {
		return nil
	}
	return n.lm.Serve(n.lmTCP)
}
