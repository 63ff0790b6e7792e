// Python's pickles, protocols 0 to 5, read as data: nothing that a pickle names is looked up,
// called or built.
//
// The interpreter's stack and memo are Python's, but where Python would call something it makes an
// *object*: what was to be called, with what, and what was to be done to the result. Values lie in
// an arena under numbers (PickleId), in 16 bytes each, and texts where the file has them. A value
// that a pickle uses twice is there once, so a pickle that Python unpacks to a terabyte stays small
// here; who walks through it as a tree must count its steps. It may also contain itself.
//
// Cost: time and memory grow with the pickle's bytes alone: at most 40 bytes for one, and no
// recursion.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// Number of a value in its Pickle.
using PickleId = uint32_t;

enum class PickleKind : uint8_t {
  kNone,
  kFalse,
  kTrue,
  kInt,   // of 64 bits
  kLong,  // beyond that: long_bytes()
  kFloat,
  kText,
  kBytes,
  kByteArray,
  kTuple,
  kList,
  kDict,
  kSet,
  kFrozenSet,
  kGlobal,      // module() and name(), of which nobody knows what they are
  kObject,      // a global (or whatever else) that would have been called: called(), arguments(),
                // changes()
  kPersistent,  // what the file's own program would have been asked for: arguments() is the id
};

/// How an object would have been made.
enum class PickleCall : uint8_t {
  kReduce,    // called(*arguments)
  kNew,       // called.__new__(called, *arguments)
  kNewKeyed,  // the same, with (arguments, keyed arguments) in a tuple
  kOld,       // INST and OBJ of protocols 0 and 1: called(*arguments)
};

class Pickle {
 public:
  /// `bytes` must outlive it: texts are there. What follows the pickle's end is not looked at.
  /// kInvalidArgument names the opcode and its byte: what Python would refuse, too; copyreg's
  /// numbers (EXT1 …) and out-of-band buffers, whose content is elsewhere; texts that are no UTF-8;
  /// pickles of 2^31 bytes and more.
  static Result<Pickle> parse(std::string_view bytes);
  Pickle(Pickle&&) noexcept = default;
  Pickle& operator=(Pickle&&) noexcept = default;

  PickleId root() const { return root_; }
  /// Values are numbered 0 … size() − 1; those of a tuple's and an object's arguments lie below its
  /// own number.
  size_t size() const { return nodes_.size(); }
  /// Bytes up to and with STOP.
  size_t length_bytes() const { return length_bytes_; }
  int protocol() const { return protocol_; }
  /// What its values take, without the file's own bytes.
  size_t memory_bytes() const {
    return nodes_.size() * sizeof(Node) + children_.size() * sizeof(PickleId) +
           segments_.size() * sizeof(Segment) + decoded_.size();
  }

  PickleKind kind(PickleId id) const { return nodes_[id].kind; }
  bool is(PickleId id, PickleKind of) const { return kind(id) == of; }
  int64_t integer(PickleId id) const { return static_cast<int64_t>(nodes_[id].bc()); }
  /// Of a kInt: it has another value from then on, wherever the pickle uses it, or is None.
  void set_none(PickleId id) { nodes_[id].kind = PickleKind::kNone; }
  void set_integer(PickleId id, int64_t value) {
    nodes_[id].b = static_cast<uint32_t>(value);
    nodes_[id].c = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
  }
  double number(PickleId id) const;          // kFloat
  std::string_view text(PickleId id) const;  // kText; kBytes and kByteArray: their bytes
  /// kLong: two's complement, little-endian; decimal digits where is_decimal().
  std::string_view long_bytes(PickleId id) const { return text(id); }
  bool is_decimal(PickleId id) const { return nodes_[id].flag & kDecimal; }
  std::string_view module(PickleId id) const { return text(nodes_[id].a); }  // kGlobal
  std::string_view name(PickleId id) const { return text(nodes_[id].b); }    // kGlobal
  bool is_global(PickleId id, std::string_view module, std::string_view name) const;

  /// kTuple and kFrozenSet.
  size_t tuple_size(PickleId id) const { return nodes_[id].b; }
  PickleId element(PickleId tuple, size_t index) const {
    return children_[nodes_[tuple].a + index];
  }

  PickleId called(PickleId object) const { return nodes_[object].a; }
  PickleId arguments(PickleId object) const {
    return nodes_[object].b;
  }  // kObject: not always a tuple
  PickleCall call(PickleId object) const { return static_cast<PickleCall>(nodes_[object].flag); }

  /// What was done to a list, dict, set or object after it was made, in order: items appended (or
  /// added to a set), pairs set (key, value, key, value …), a state given to it.
  struct Change {
    enum class Kind : uint8_t { kItems, kPairs, kState } kind;
    uint32_t count;  // of values: pairs have two
    uint32_t first;  // the number of the first of them, for value()
  };
  class Changes {
   public:
    Changes(const Pickle& pickle, uint32_t tail)
        : pickle_(pickle), tail_(tail), at_(tail == 0 ? 0 : pickle.segments_[tail].next) {}
    bool more() const { return at_ != 0; }
    Change operator*() const {
      const Segment& segment = pickle_.segments_[at_];
      return {static_cast<Change::Kind>(segment.kind), segment.count, segment.first};
    }
    void next() { at_ = at_ == tail_ ? 0 : pickle_.segments_[at_].next; }

   private:
    const Pickle& pickle_;
    uint32_t tail_, at_;
  };
  Changes changes(PickleId id) const { return Changes(*this, has_changes(id) ? nodes_[id].c : 0); }
  bool has_changes(PickleId id) const {
    return is(id, PickleKind::kList) || is(id, PickleKind::kDict) || is(id, PickleKind::kSet) ||
           is(id, PickleKind::kObject);
  }
  PickleId value(uint32_t number) const { return children_[number]; }

  /// f(key, value) → Result<> for all pairs that a dict, or an object in the manner of OrderedDict,
  /// was given.
  template <class F>
  Result<> for_pairs(PickleId id, F&& f) const {
    for (Changes changes = this->changes(id); changes.more(); changes.next()) {
      const Change change = *changes;
      if (change.kind != Change::Kind::kPairs) continue;
      for (uint32_t i = 0; i < change.count; i += 2) {
        PTC_TRY(f(value(change.first + i), value(change.first + i + 1)));
      }
    }
    return ok();
  }
  /// f(item) → Result<> for the elements of a tuple, and all items that a list, set or object was
  /// given.
  template <class F>
  Result<> for_items(PickleId id, F&& f) const {
    if (is(id, PickleKind::kTuple) || is(id, PickleKind::kFrozenSet)) {
      for (size_t i = 0; i < tuple_size(id); ++i) {
        PTC_TRY(f(element(id, i)));
      }
      return ok();
    }
    for (Changes changes = this->changes(id); changes.more(); changes.next()) {
      const Change change = *changes;
      if (change.kind != Change::Kind::kItems) continue;
      for (uint32_t i = 0; i < change.count; ++i) {
        PTC_TRY(f(value(change.first + i)));
      }
    }
    return ok();
  }
  /// f(state) → Result<> for each state that an object was given (BUILD).
  template <class F>
  Result<> for_states(PickleId id, F&& f) const {
    for (Changes changes = this->changes(id); changes.more(); changes.next()) {
      if ((*changes).kind != Change::Kind::kState) continue;
      PTC_TRY(f(value((*changes).first)));
    }
    return ok();
  }

  /// "a dict", "torch.Size(…)": for messages.
  std::string describe(PickleId id) const;

 private:
  friend class PickleParser;
  static constexpr uint8_t kDecimal = 1, kDecoded = 2;

  /// flag: PickleCall, kDecimal, kDecoded. Text: a is where it begins, b its length. Tuple: a is
  /// the first child, b their number. Global: a, b. Object: a what is called, b with what, c the
  /// last segment. List, dict, set: c. Int, float: b and c.
  struct Node {
    PickleKind kind;
    uint8_t flag;
    uint16_t unused;
    uint32_t a, b, c;
    uint64_t bc() const { return b | static_cast<uint64_t>(c) << 32; }
  };
  static_assert(sizeof(Node) == 16);
  struct Segment {
    uint32_t kind, first, count;
    uint32_t next;  // of the last one: the first
  };

  /// A vector that never moves what it has, and so never needs the memory twice.
  template <class T>
  class Chunked {
   public:
    /// `most`: how many there can be at all, if that is few.
    explicit Chunked(size_t most = SIZE_MAX) : first_(std::min(most, kChunk)) {}
    const T& operator[](size_t i) const { return chunks_[i / kChunk][i % kChunk]; }
    T& operator[](size_t i) { return chunks_[i / kChunk][i % kChunk]; }
    size_t size() const { return size_; }
    void push_back(const T& value) {
      if (size_ == room_) grow();
      chunks_[size_ / kChunk][size_ % kChunk] = value;
      ++size_;
    }

   private:
    static constexpr size_t kChunk = 1 << 14;
    void grow() {
      if (room_ == 0 || first_ == kChunk) {
        chunks_.push_back(std::make_unique_for_overwrite<T[]>(room_ == 0 ? first_ : kChunk));
        room_ += room_ == 0 ? first_ : kChunk;
        return;
      }
      auto whole = std::make_unique_for_overwrite<T[]>(kChunk);  // `most` was not the most
      std::copy_n(chunks_[0].get(), size_, whole.get());
      chunks_[0] = std::move(whole);
      room_ = first_ = kChunk;
    }
    std::vector<std::unique_ptr<T[]>> chunks_;
    size_t first_, size_ = 0, room_ = 0;
  };

  explicit Pickle(std::string_view bytes);

  std::string_view bytes_;
  Chunked<Node> nodes_;
  Chunked<PickleId> children_;
  Chunked<Segment> segments_;  // 0 is none
  std::string decoded_;        // texts that the file has with escapes
  PickleId root_ = 0;
  size_t length_bytes_ = 0;
  int protocol_ = 0;
};

}  // namespace ptc
