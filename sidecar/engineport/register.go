package engineport

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"membrane/kvwire"
	"membrane/sidecar/auth"
)

func (c *conn) handleHello(body []byte) error {
	var hello kvwire.Hello
	if err := strictJSON(body, &hello); err != nil {
		return err
	}
	if len(hello.Client) > kvwire.MaxID {
		return kvwire.Errorf(kvwire.CodeTooLarge, "client", "%d bytes are more than %d", len(hello.Client), kvwire.MaxID)
	}
	// On the engine socket the user id is the credential, and a key may name
	// another tenant: a client that moves here from the port keeps its own.
	if keys := c.s.cfg.Keys; keys != nil && (c.unix == nil || hello.Key != "") {
		id, ok := keys.Lookup(hello.Key)
		if !ok || !id.Scopes.Allows(auth.ScopeEngine) {
			return kvwire.Errorf(kvwire.CodeUnauthorized, "key", "an API key with the scope engine is needed")
		}
		if c.eng != nil && id.Tenant != c.identity.Tenant {
			return kvwire.Errorf(kvwire.CodeBadField, "key", "this connection is registered for another tenant")
		}
		c.identity = id
	}
	if !c.greeted {
		c.greeted = true
		if err := c.nc.SetReadDeadline(noDeadline); err != nil {
			return closing{err}
		}
	}
	c.s.mu.Lock()
	socket := c.s.socket
	c.s.met(c)
	c.s.mu.Unlock()
	return c.answerJSON(kvwire.HelloAnswer{Node: c.s.cfg.Node, Server: c.s.cfg.Server, Socket: socket})
}

func (c *conn) handleRegister(body []byte) error {
	if c.eng != nil {
		return kvwire.Errorf(kvwire.CodeBadField, "engine", "this connection is registered already")
	}
	var reg kvwire.Register
	if err := strictJSON(body, &reg); err != nil {
		return err
	}
	if err := checkRegister(reg); err != nil {
		return err
	}
	pageTokens, err := kvwire.PageTokens(c.s.cfg.PageTokens, reg.Descriptor.BlockTokens)
	if n := reg.PageTokens; n != 0 {
		pageTokens, err = n, nil
		if n < kvwire.MinPageTokens || n > kvwire.MaxPageTokens || n%reg.Descriptor.BlockTokens != 0 {
			err = kvwire.Errorf(kvwire.CodeBadField, "page_tokens", "%d is not a multiple of the block's %d tokens between %d and %d", n, reg.Descriptor.BlockTokens, kvwire.MinPageTokens, kvwire.MaxPageTokens)
		}
	}
	if err != nil {
		return err
	}
	object := int64(pageTokens/reg.Descriptor.BlockTokens) * reg.Descriptor.BlockBytes
	if object > kvwire.MaxObject {
		return kvwire.Errorf(kvwire.CodeTooLarge, "descriptor.block_bytes", "an object of %d blocks has %d bytes, more than %d", pageTokens/reg.Descriptor.BlockTokens, object, kvwire.MaxObject)
	}
	if err := c.join(reg, pageTokens, object); err != nil {
		return err
	}
	answer := kvwire.Registered{
		Namespace: c.eng.space.Namespace().String(), Form: c.eng.form.String(), PageTokens: pageTokens,
		ObjectBytes: object, Tenant: c.identity.Tenant, MaxLeaseMS: int(MaxLease.Milliseconds()),
	}
	if c.unix != nil && !reg.Inline && c.role != kvwire.RoleScheduler {
		answer.SharedMemory = true
		answer.ArenaBytes = c.s.cfg.Cache.Arena().Size()
		c.files = append(c.files[:0], c.s.cfg.Cache.Arena().FD())
		if err := c.openInbox(reg.InboxSlots); err != nil {
			c.leave()
			return err
		}
		if c.inbox != nil {
			answer.InboxBytes, answer.SlotBytes = c.inbox.size(), c.inbox.slotSize
			answer.InboxSlots = int(c.inbox.size() / c.inbox.slotSize)
			c.files = append(c.files, c.inbox.fd)
		}
	}
	c.s.cfg.Log.Info().Str("engine", reg.Engine).Str("role", string(reg.Role)).Stringer("shard", c.shard).
		Str("tenant", c.identity.Tenant).Str("namespace", answer.Namespace[:16]).Str("form", answer.Form).
		Int("page_tokens", pageTokens).Int("inbox_slots", answer.InboxSlots).Str("from", c.name()).Msg("engine registered")
	if pageTokens != c.s.cfg.PageTokens {
		c.s.cfg.Log.Info().Str("engine", reg.Engine).Int("page_tokens", pageTokens).Int("configured", c.s.cfg.PageTokens).
			Msg("pages of this engine have another size than --page-tokens: its block is larger, or it hashes pages itself")
	}
	return c.answerJSON(answer)
}

func checkRegister(reg kvwire.Register) error {
	if err := auth.CheckSubject(reg.Engine); err != nil {
		return kvwire.Errorf(kvwire.CodeBadField, "engine", "%q is not a name: 1 to %d bytes without space, colon, slash, backslash, quote and control characters", clip(reg.Engine), kvwire.MaxID)
	}
	switch reg.Role {
	case kvwire.RoleScheduler, kvwire.RoleWorker, kvwire.RoleBoth:
	default:
		return kvwire.Errorf(kvwire.CodeBadField, "role", "%q is not one of scheduler, worker, both", clip(string(reg.Role)))
	}
	if err := reg.Model.Validate(); err != nil {
		return err
	}
	if err := reg.Descriptor.Validate(reg.Model); err != nil {
		return err
	}
	if reg.InboxSlots < 0 || reg.InboxSlots > kvwire.MaxBatch {
		return kvwire.Errorf(kvwire.CodeBadField, "inbox_slots", "%d is not between 0 and %d", reg.InboxSlots, kvwire.MaxBatch)
	}
	if n := reg.Descriptor.Shard().Count; reg.Role == kvwire.RoleBoth && n != 1 {
		return kvwire.Errorf(kvwire.CodeBadField, "role", "an engine of one process has one shard and not %d", n)
	}
	return nil
}

// openInbox gives the connection up to slots inbox slots, as far as its part
// of the budget goes.
func (c *conn) openInbox(slots int) error {
	if slots == 0 {
		return nil
	}
	slot := (c.object + slotAlign - 1) / slotAlign * slotAlign
	c.s.mu.Lock()
	// Each rank of an engine stores at the same time: the first to come must
	// not leave the others without.
	part := min(c.s.inboxLeft, c.s.cfg.InboxBytes/int64(c.shard.Count))
	granted := int64(slots)
	if guard.inboxCap() {
		granted = min(granted, part/slot)
	}
	c.s.inboxLeft -= granted * slot
	c.s.mu.Unlock()
	if granted == 0 {
		c.s.cfg.Log.Warn().Int64("slot_bytes", slot).Int64("inbox_bytes", c.s.cfg.InboxBytes).Msg("no room in --inbox: the engine stores inline")
		return nil
	}
	in, err := newInbox(int(granted), c.object)
	if err != nil {
		c.s.mu.Lock()
		c.s.inboxLeft += granted * slot
		c.s.mu.Unlock()
		return err
	}
	c.inbox = in
	return nil
}

func (c *conn) closeInbox() {
	if c.inbox == nil {
		return
	}
	size := c.inbox.size()
	c.s.slots.Add(-int64(len(c.inbox.reserved)))
	c.inbox.close()
	c.inbox = nil
	c.s.mu.Lock()
	c.s.inboxLeft += size
	c.s.mu.Unlock()
}

func (c *conn) answerJSON(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cannot encode the answer: %w", err)
	}
	if len(b) > kvwire.MaxJSON {
		return fmt.Errorf("cannot send an answer of %d bytes: more than %d", len(b), kvwire.MaxJSON)
	}
	c.out = append(c.out, b...)
	return nil
}

// strictJSON decodes one JSON object and refuses fields that it does not know.
func strictJSON(body []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return kvwire.Errorf(kvwire.CodeBadField, wrong.Field, "a %s is not a %s", wrong.Value, wrong.Type)
		}
		return kvwire.Errorf(kvwire.CodeBadField, "body", "%v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return kvwire.Errorf(kvwire.CodeBadField, "body", "something follows the JSON object")
	}
	return nil
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}
