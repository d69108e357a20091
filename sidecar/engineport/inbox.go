package engineport

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// slotAlign is the granularity of inbox slots: a page of memory, so that the
// engine can register or advise each by itself.
const slotAlign = 4 << 10

// inbox is shared memory that one connection writes pages into. The engine
// can change its bytes at any time; what is kept is copied out first and
// checked afterwards. Its size is sealed, so that no engine can take pages
// from under our reads.
type inbox struct {
	fd       int
	mem      []byte
	slotSize int64
	object   int64

	free     []uint32
	reserved map[uint32]reservation // by slot
	byPage   map[pageRef]uint32
}

// pageRef is a page of a chain, by handle.
type pageRef struct {
	handle uint64
	page   uint32
}

type reservation struct {
	pageRef
	epoch uint64 // of the space when the slot was reserved
}

func newInbox(slots int, object int64) (*inbox, error) {
	in := &inbox{
		slotSize: (object + slotAlign - 1) / slotAlign * slotAlign, object: object,
		reserved: make(map[uint32]reservation), byPage: make(map[pageRef]uint32),
	}
	size := int64(slots) * in.slotSize
	fd, err := unix.MemfdCreate("membrane-inbox", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("cannot create inbox memfd: %w", err)
	}
	in.fd = fd
	if err := in.prepare(size); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	in.free = make([]uint32, slots)
	for i := range in.free {
		in.free[i] = uint32(slots - 1 - i) // slot 0 is taken first
	}
	return in, nil
}

func (in *inbox) prepare(size int64) error {
	if err := unix.Ftruncate(in.fd, size); err != nil {
		return fmt.Errorf("cannot size inbox to %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(in.fd), unix.F_ADD_SEALS, inboxSeals()); err != nil {
		return fmt.Errorf("cannot seal inbox: %w", err)
	}
	mem, err := unix.Mmap(in.fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("cannot map inbox of %d bytes: %w", size, err)
	}
	in.mem = mem
	// Faulted in by us, the memory is charged to the sidecar and not to the
	// engine that writes it. Where the kernel cannot, the first write does.
	_ = unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	return nil
}

// bytes returns the object in a slot.
func (in *inbox) bytes(slot uint32) []byte {
	begin := int64(slot) * in.slotSize
	return in.mem[begin : begin+in.object : begin+in.object]
}

// reserve takes a free slot for a page, or the one that it has already.
func (in *inbox) reserve(ref pageRef, epoch uint64) (uint32, bool) {
	if slot, ok := in.byPage[ref]; ok {
		in.reserved[slot] = reservation{ref, epoch}
		return slot, true
	}
	if len(in.free) == 0 {
		return 0, false
	}
	slot := in.free[len(in.free)-1]
	in.free = in.free[:len(in.free)-1]
	in.reserved[slot] = reservation{ref, epoch}
	in.byPage[ref] = slot
	return slot, true
}

// release gives a slot back.
func (in *inbox) release(slot uint32) {
	r, ok := in.reserved[slot]
	if !ok {
		return
	}
	delete(in.reserved, slot)
	delete(in.byPage, r.pageRef)
	in.free = append(in.free, slot)
}

// drop gives back the slots that are reserved for a chain.
func (in *inbox) drop(handle uint64) {
	for slot, r := range in.reserved {
		if r.handle == handle {
			in.release(slot)
		}
	}
}

func (in *inbox) size() int64 { return int64(len(in.mem)) }

func (in *inbox) close() {
	_ = unix.Munmap(in.mem)
	_ = unix.Close(in.fd)
	in.mem, in.fd = nil, -1
}

// holds reports whether a slot is reserved for a page.
func (in *inbox) holds(slot uint32, ref pageRef) bool {
	r, ok := in.reserved[slot]
	return ok && r.pageRef == ref
}
