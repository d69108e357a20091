// Package layout knows how the bytes of every engine's KV pages are laid out
// and translates one layout into another.
//
// A [Descriptor] is what an engine registered, resolved: where each number of a
// shard's object lies. [NewPlan] works out once how one reader's shard is made
// of the shards of a writer, whatever their tensor and pipeline parallel sizes,
// and [Plan.Run] does it for a page without allocating. Layouts stand in one
// table, packings in another.
//
// Nothing is converted: numbers move as they are. What cannot be translated
// exactly is refused by an [*Error] that names the field and both values.
//
// The package does not know where pages are kept, who asks for them or when;
// and the wire form of a descriptor belongs to kvwire.
package layout
