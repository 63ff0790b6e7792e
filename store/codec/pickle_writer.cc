#include "store/codec/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "store/base/json.h"

namespace ptc {
namespace {

class PickleCopier {
 public:
  PickleCopier(const Pickle& pickle, const PickleReplace& replace, PickleWriter& writer)
      : pickle_(pickle),
        replace_(replace),
        writer_(writer),
        memo_(pickle.size(), kUnwritten),
        shared_(pickle.size()) {
    count_uses();
  }

  Result<> run(PickleId id) {
    tasks_.assign(1, {Task::kValue, id, 0});
    while (!tasks_.empty()) {
      const Task task = tasks_.back();
      tasks_.pop_back();
      switch (task.kind) {
        case Task::kValue: {
          PTC_TRY(value(task.a));
          break;
        }
        case Task::kOpcode:
          writer_.opcode(static_cast<char>(task.a));
          break;
        case Task::kDone:
          done(task.a);
          break;
        case Task::kChanges:
          changes(task.a);
          break;
        case Task::kElements:
          elements(task.a, task.b);
          break;
        case Task::kChildren:
          children(task.a, task.b);
          break;
      }
    }
    return ok();
  }

 private:
  using Kind = PickleKind;
  static constexpr uint32_t kUnwritten = UINT32_MAX, kOpen = UINT32_MAX - 1;

  struct Task {
    enum Kind : uint32_t { kValue, kOpcode, kDone, kChanges, kElements, kChildren } kind;
    uint32_t a, b;
  };
  void later(Task::Kind kind, uint32_t a, uint32_t b = 0) { tasks_.push_back({kind, a, b}); }

  /// Which values are used more than once: those are remembered.
  void count_uses() {
    std::vector<bool> used(pickle_.size());
    auto use = [&](PickleId id) {
      if (used[id]) shared_[id] = true;
      used[id] = true;
    };
    use(pickle_.root());
    for (PickleId id = 0; id < pickle_.size(); ++id) {
      switch (pickle_.kind(id)) {
        case Kind::kTuple:
        case Kind::kFrozenSet:
          for (size_t i = 0; i < pickle_.tuple_size(id); ++i) use(pickle_.element(id, i));
          break;
        case Kind::kObject:
          use(pickle_.called(id)), use(pickle_.arguments(id));
          break;
        case Kind::kPersistent:
          use(pickle_.arguments(id));
          break;
        default:
          break;
      }
      for (Pickle::Changes changes = pickle_.changes(id); changes.more(); changes.next())
        for (uint32_t i = 0; i < (*changes).count; ++i) use(pickle_.value((*changes).first + i));
    }
  }

  void done(PickleId id) { memo_[id] = shared_[id] ? writer_.put() : kUnwritten; }

  Result<> value(PickleId id) {
    switch (pickle_.kind(id)) {
      case Kind::kNone:
        writer_.none();
        return ok();
      case Kind::kFalse:
        writer_.boolean(false);
        return ok();
      case Kind::kTrue:
        writer_.boolean(true);
        return ok();
      case Kind::kInt:
        writer_.integer(pickle_.integer(id));
        return ok();
      case Kind::kFloat:
        writer_.number(pickle_.number(id));
        return ok();
      default:
        break;
    }
    if (memo_[id] == kOpen)
      return invalid_argument("{} contains itself; only lists, dicts and states can",
                              pickle_.describe(id));
    if (memo_[id] != kUnwritten) return writer_.get(memo_[id]), ok();
    switch (pickle_.kind(id)) {
      case Kind::kText:
        writer_.text(pickle_.text(id));
        break;
      case Kind::kLong:
        long_number(id);
        break;
      case Kind::kBytes:
        writer_.bytes(pickle_.text(id));
        break;
      case Kind::kByteArray:
        writer_.known_global("__builtin__", "bytearray");
        writer_.bytes(pickle_.text(id));
        writer_.opcode('\x85');
        writer_.opcode('R');
        break;
      case Kind::kGlobal: {
        PTC_TRY(writer_.global(pickle_.module(id), pickle_.name(id)));
        break;
      }
      case Kind::kList:
      case Kind::kDict:
        writer_.opcode(pickle_.is(id, Kind::kList) ? ']' : '}');
        done(id);
        later(Task::kChanges, id);
        return ok();
      case Kind::kSet:
      case Kind::kFrozenSet:  // set([…])
        writer_.known_global("__builtin__", pickle_.is(id, Kind::kSet) ? "set" : "frozenset");
        writer_.opcode(']');
        memo_[id] = kOpen;
        later(Task::kDone, id);
        later(Task::kOpcode, 'R');
        later(Task::kOpcode, 0x85);
        if (pickle_.is(id, Kind::kSet)) {
          later(Task::kChanges, id);
        } else if (pickle_.tuple_size(id) > 0) {
          writer_.opcode('(');
          later(Task::kOpcode, 'e');
          later(Task::kElements, id);
        }
        return ok();
      case Kind::kTuple:
        return tuple(id);
      case Kind::kObject:
        return object(id);
      case Kind::kPersistent:
        return persistent(id);
      default:
        return ok();
    }
    done(id);
    return ok();
  }

  /// True if something else was written, or will be.
  Result<bool> replaced(PickleId id) {
    if (!replace_) return false;
    PTC_TRY(auto replacement, replace_(id, writer_));
    if (replacement.kind == PickleReplacement::Kind::kKeep) return false;
    memo_[id] = kOpen;
    later(Task::kDone, id);
    if (replacement.kind == PickleReplacement::Kind::kOther) {
      later(Task::kValue, replacement.other);
    } else {
      later(Task::kOpcode, 't');
      later(Task::kElements, id, static_cast<uint32_t>(replacement.from));
    }
    return true;
  }

  Result<> tuple(PickleId id) {
    const size_t size = pickle_.tuple_size(id);
    if (size == 0) return writer_.opcode(')'), ok();
    PTC_TRY(auto other, replaced(id));
    if (other) return ok();
    memo_[id] = kOpen;
    later(Task::kDone, id);
    if (size > 3) writer_.opcode('(');
    later(Task::kOpcode, size > 3 ? 't' : 0x84 + static_cast<uint32_t>(size));
    later(Task::kElements, id);
    return ok();
  }

  Result<> persistent(PickleId id) {
    PickleReplacement replacement;
    if (replace_) {
      PTC_TRY(replacement, replace_(id, writer_));
    }
    memo_[id] = kOpen;
    later(Task::kDone, id);
    if (replacement.kind == PickleReplacement::Kind::kOther) {
      later(Task::kValue, replacement.other);
      return ok();
    }
    later(Task::kOpcode, 'Q');
    if (replacement.kind == PickleReplacement::Kind::kKeep) {
      later(Task::kValue, pickle_.arguments(id));
    } else {
      later(Task::kOpcode, 't');
      later(Task::kElements, pickle_.arguments(id), static_cast<uint32_t>(replacement.from));
    }
    return ok();
  }

  Result<> object(PickleId id) {
    PTC_TRY(auto other, replaced(id));
    if (other) return ok();
    memo_[id] = kOpen;
    later(Task::kChanges, id);
    later(Task::kDone, id);
    const PickleId arguments = pickle_.arguments(id);
    switch (pickle_.call(id)) {
      case PickleCall::kReduce:
        later(Task::kOpcode, 'R');
        break;
      case PickleCall::kNew:
        later(Task::kOpcode, 0x81);
        break;
      case PickleCall::kNewKeyed:
        later(Task::kOpcode, 0x92);
        later(Task::kElements, arguments);
        later(Task::kValue, pickle_.called(id));
        return ok();
      case PickleCall::kOld:
        writer_.opcode('(');
        later(Task::kOpcode, 'o');
        later(Task::kElements, arguments);
        later(Task::kValue, pickle_.called(id));
        return ok();
    }
    later(Task::kValue, arguments);
    later(Task::kValue, pickle_.called(id));
    return ok();
  }

  /// Runs of values are written one by one, so that few tasks wait at any time.
  void elements(PickleId id, uint32_t from) {
    if (from >= pickle_.tuple_size(id)) return;
    later(Task::kElements, id, from + 1);
    later(Task::kValue, pickle_.element(id, from));
  }
  void children(uint32_t first, uint32_t count) {
    if (count == 0) return;
    later(Task::kChildren, first + 1, count - 1);
    later(Task::kValue, pickle_.value(first));
  }
  void changes(PickleId id) {
    // The last of them is done last, and so comes first on the stack of tasks.
    const size_t begin = tasks_.size();
    for (Pickle::Changes changes = pickle_.changes(id); changes.more(); changes.next()) {
      const Pickle::Change change = *changes;
      if (change.kind != Pickle::Change::Kind::kState) later(Task::kOpcode, '(');
      later(Task::kChildren, change.first, change.count);
      later(Task::kOpcode, change.kind == Pickle::Change::Kind::kState   ? 'b'
                           : change.kind == Pickle::Change::Kind::kItems ? 'e'
                                                                         : 'u');
    }
    std::reverse(tasks_.begin() + static_cast<ptrdiff_t>(begin), tasks_.end());
  }

  void long_number(PickleId id) {
    const std::string_view bytes = pickle_.long_bytes(id);
    if (pickle_.is_decimal(id)) {
      writer_.opcode('L');
      for (const char c : bytes) writer_.opcode(c);
      writer_.opcode('L');
      writer_.opcode('\n');
      return;
    }
    const uint32_t size = static_cast<uint32_t>(bytes.size());
    writer_.opcode(size < 256 ? '\x8a' : '\x8b');
    for (unsigned i = 0; i < (size < 256 ? 1u : 4u); ++i)
      writer_.opcode(static_cast<char>(size >> 8 * i));
    for (const char c : bytes) writer_.opcode(c);
  }

  const Pickle& pickle_;
  const PickleReplace& replace_;
  PickleWriter& writer_;
  std::vector<uint32_t> memo_;
  std::vector<bool> shared_;
  std::vector<Task> tasks_;
};

}  // namespace

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    opcode('K');
    raw(static_cast<uint8_t>(value));
  } else if (value >= 0 && value < 65536) {
    opcode('M');
    raw(static_cast<uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    opcode('J');
    raw(static_cast<int32_t>(value));
  } else {
    uint8_t size = 8;  // the fewest bytes that keep the sign
    while (size > 1 && value << (8 * (9 - size)) >> (8 * (9 - size)) == value) --size;
    opcode('\x8a');
    raw(size);
    out_.append(reinterpret_cast<const char*>(&value), size);
  }
}

void PickleWriter::number(double value) {
  opcode('G');
  raw(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

void PickleWriter::text(std::string_view value) {
  PTC_CHECK(value.size() <= UINT32_MAX);
  opcode('X');
  raw(static_cast<uint32_t>(value.size()));
  out_ += value;
}

void PickleWriter::bytes(std::string_view value) {
  known_global("_codecs", "encode");
  std::string text;
  for (const char c : value) {
    if (c >= 0) text += c;
    else
      text += {static_cast<char>(0xC0 | static_cast<unsigned char>(c) >> 6),
               static_cast<char>(0x80 | (c & 0x3F))};
  }
  this->text(text);
  this->text("latin1");
  opcode('\x86');
  opcode('R');
}

Result<> PickleWriter::global(std::string_view module, std::string_view name) {
  if (module.find('\n') != std::string_view::npos || name.find('\n') != std::string_view::npos)
    return invalid_argument("the name {} has a line break",
                            quoted(fmt::format("{}.{}", module, name)));
  opcode('c');
  out_.append(module).append("\n").append(name).append("\n");
  return ok();
}

void PickleWriter::known_global(const char* module, const char* name) {
  for (const auto& [known, number] : known_)
    if (known.first == module && known.second == name) return get(number);
  PTC_CHECK(global(module, name).has_value());
  known_.push_back({{module, name}, put()});
}

void PickleWriter::numbers(const uint64_t* begin, const uint64_t* end) {
  const size_t count = static_cast<size_t>(end - begin);
  if (count == 0) return opcode(')');
  if (count > 3) opcode('(');
  for (; begin != end; ++begin) integer(static_cast<int64_t>(*begin));
  opcode(count > 3 ? 't' : static_cast<char>(0x84 + count));
}

uint32_t PickleWriter::put() {
  opcode(remembered_ < 256 ? 'q' : 'r');
  if (remembered_ < 256) raw(static_cast<uint8_t>(remembered_));
  else raw(remembered_);
  return remembered_++;
}

void PickleWriter::get(uint32_t number) {
  opcode(number < 256 ? 'h' : 'j');
  if (number < 256) raw(static_cast<uint8_t>(number));
  else raw(number);
}

std::string PickleWriter::finish() && {
  opcode('.');
  return std::move(out_);
}

Result<std::string> copy_pickle(const Pickle& pickle, const PickleReplace& replace) {
  PickleWriter writer;
  PTC_TRY(PickleCopier(pickle, replace, writer).run(pickle.root()));
  return std::move(writer).finish();
}

class PickleValues::Copier {
 public:
  Copier(const Pickle& pickle, PickleWriter& writer) : copier_(pickle, none_, writer) {}
  Result<> write(PickleId id) { return copier_.run(id); }

 private:
  const PickleReplace none_;
  PickleCopier copier_;
};

PickleValues::PickleValues(const Pickle& pickle, PickleWriter& writer)
    : copier_(std::make_unique<Copier>(pickle, writer)) {}
PickleValues::~PickleValues() = default;
PickleValues::PickleValues(PickleValues&&) noexcept = default;
Result<> PickleValues::write(PickleId id) { return copier_->write(id); }

}  // namespace ptc
