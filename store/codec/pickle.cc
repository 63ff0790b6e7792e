#include "store/codec/pickle.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr PickleId kNoneId = 0, kFalseId = 1, kTrueId = 2, kEmptyTupleId = 3;
constexpr size_t kMostBytes = INT32_MAX;
constexpr int kHighestProtocol = 5;

constexpr std::array<const char*, 256> opcode_names() {
  std::array<const char*, 256> names{};
  constexpr std::pair<uint8_t, const char*> kNames[] = {{'(', "MARK"},
                                                        {'.', "STOP"},
                                                        {'0', "POP"},
                                                        {'1', "POP_MARK"},
                                                        {'2', "DUP"},
                                                        {'F', "FLOAT"},
                                                        {'I', "INT"},
                                                        {'J', "BININT"},
                                                        {'K', "BININT1"},
                                                        {'L', "LONG"},
                                                        {'M', "BININT2"},
                                                        {'N', "NONE"},
                                                        {'P', "PERSID"},
                                                        {'Q', "BINPERSID"},
                                                        {'R', "REDUCE"},
                                                        {'S', "STRING"},
                                                        {'T', "BINSTRING"},
                                                        {'U', "SHORT_BINSTRING"},
                                                        {'V', "UNICODE"},
                                                        {'X', "BINUNICODE"},
                                                        {'a', "APPEND"},
                                                        {'b', "BUILD"},
                                                        {'c', "GLOBAL"},
                                                        {'d', "DICT"},
                                                        {'}', "EMPTY_DICT"},
                                                        {'e', "APPENDS"},
                                                        {'g', "GET"},
                                                        {'h', "BINGET"},
                                                        {'i', "INST"},
                                                        {'j', "LONG_BINGET"},
                                                        {'l', "LIST"},
                                                        {']', "EMPTY_LIST"},
                                                        {'o', "OBJ"},
                                                        {'p', "PUT"},
                                                        {'q', "BINPUT"},
                                                        {'r', "LONG_BINPUT"},
                                                        {'s', "SETITEM"},
                                                        {'t', "TUPLE"},
                                                        {')', "EMPTY_TUPLE"},
                                                        {'u', "SETITEMS"},
                                                        {'G', "BINFLOAT"},
                                                        {'B', "BINBYTES"},
                                                        {'C', "SHORT_BINBYTES"},
                                                        {0x80, "PROTO"},
                                                        {0x81, "NEWOBJ"},
                                                        {0x82, "EXT1"},
                                                        {0x83, "EXT2"},
                                                        {0x84, "EXT4"},
                                                        {0x85, "TUPLE1"},
                                                        {0x86, "TUPLE2"},
                                                        {0x87, "TUPLE3"},
                                                        {0x88, "NEWTRUE"},
                                                        {0x89, "NEWFALSE"},
                                                        {0x8a, "LONG1"},
                                                        {0x8b, "LONG4"},
                                                        {0x8c, "SHORT_BINUNICODE"},
                                                        {0x8d, "BINUNICODE8"},
                                                        {0x8e, "BINBYTES8"},
                                                        {0x8f, "EMPTY_SET"},
                                                        {0x90, "ADDITEMS"},
                                                        {0x91, "FROZENSET"},
                                                        {0x92, "NEWOBJ_EX"},
                                                        {0x93, "STACK_GLOBAL"},
                                                        {0x94, "MEMOIZE"},
                                                        {0x95, "FRAME"},
                                                        {0x96, "BYTEARRAY8"},
                                                        {0x97, "NEXT_BUFFER"},
                                                        {0x98, "READONLY_BUFFER"}};
  for (const auto& [code, name] : kNames) names[code] = name;
  return names;
}
constexpr std::array<const char*, 256> kOpcodeNames = opcode_names();

bool is_ascii(std::string_view text) {
  const char* at = text.data();
  size_t left = text.size();
  uint64_t all = 0;
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    all |= word;
  }
  for (; left > 0; --left, ++at)
    all |= static_cast<unsigned char>(*at) >= 0x80 ? uint64_t{0x80} : 0;
  return (all & 0x8080808080808080u) == 0;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
  } else if (code < 0x10000) {
    out += {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3F)),
            static_cast<char>(0x80 | (code & 0x3F))};
  } else {
    out += {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 0x3F)),
            static_cast<char>(0x80 | (code >> 6 & 0x3F)), static_cast<char>(0x80 | (code & 0x3F))};
  }
}

/// The number of so many digits that `text` has at its front, which are taken off; nullopt: it has
/// none.
std::optional<uint32_t> take_digits(std::string_view& text, size_t digits, int base) {
  uint32_t value = 0;
  if (text.size() < digits) return {};
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value, base);
  if (error != std::errc() || end != text.data() + digits) return {};
  text.remove_prefix(digits);
  return value;
}

/// Decodes Python's "raw-unicode-escape": Latin-1, \uXXXX and \UXXXXXXXX.
bool append_raw_unicode(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const char c = text[0];
    text.remove_prefix(1);
    if (c == '\\' && !text.empty() && (text[0] == 'u' || text[0] == 'U')) {
      const size_t digits = text[0] == 'u' ? 4 : 8;
      text.remove_prefix(1);
      const std::optional<uint32_t> code = take_digits(text, digits, 16);
      if (!code || *code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000)) return false;
      append_utf8(out, *code);
    } else {
      append_utf8(out, static_cast<unsigned char>(c));
    }
  }
  return true;
}

/// Decodes the inside of a byte string literal of Python.
bool append_unescaped(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const char c = text[0];
    text.remove_prefix(1);
    if (c != '\\') {
      out += c;
      continue;
    }
    if (text.empty()) return false;
    const char escape = text[0];
    if (escape >= '0' && escape <= '7') {
      size_t digits = 1;
      while (digits < 3 && digits < text.size() && text[digits] >= '0' && text[digits] <= '7')
        ++digits;
      out += static_cast<char>(*take_digits(text, digits, 8));
      continue;
    }
    text.remove_prefix(1);
    constexpr std::string_view kEscapes = "\\'\"nrtabfv", kMeanings = "\\'\"\n\r\t\a\b\f\v";
    if (escape == 'x') {
      const std::optional<uint32_t> code = take_digits(text, 2, 16);
      if (!code) return false;
      out += static_cast<char>(*code);
    } else if (const size_t which = kEscapes.find(escape); which != std::string_view::npos) {
      out += kMeanings[which];
    } else {
      out += {'\\', escape};
    }
  }
  return true;
}

}  // namespace

class PickleParser {
 public:
  explicit PickleParser(std::string_view bytes)
      : pickle_(bytes), begin_(bytes.data()), at_(begin_), end_(begin_ + bytes.size()) {}

  Result<Pickle> parse() {
    if (end_ - begin_ > static_cast<ptrdiff_t>(kMostBytes))
      return invalid_argument("the pickle has {} bytes; those of less than 2 GiB are read",
                              end_ - begin_);
    while (at_ != end_) {
      opcode_at_ = at_;
      const uint8_t opcode = static_cast<uint8_t>(*at_++);
      if (opcode == '.') break;
      if (!step(opcode)) return error(opcode);
    }
    if (at_ == begin_ || at_[-1] != '.' || opcode_at_ != at_ - 1)
      return invalid_argument("the pickle ends at byte {} without a STOP; it was cut short",
                              end_ - begin_);
    if (!has(1)) return error('.');  // of more than one value Python, too, takes the last
    pickle_.root_ = stack_.back();
    pickle_.length_bytes_ = static_cast<size_t>(at_ - begin_);
    return std::move(pickle_);
  }

 private:
  using Kind = PickleKind;
  using Node = Pickle::Node;

  Error error(uint8_t opcode) const {
    const char* name = kOpcodeNames[opcode];
    return invalid_argument(
        "pickle, byte {}: {}: {}", opcode_at_ - begin_,
        name != nullptr ? std::string(name) : fmt::format("opcode 0x{:02x}", opcode),
        problem_.empty() ? "it wants more values than there are" : problem_);
  }
  bool fail(std::string what) {
    problem_ = std::move(what);
    return false;
  }

  // Of the input.
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  template <class Number>
  bool take(Number& value) {
    if (left() < sizeof value) return fail("the pickle ends inside of it");
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return true;
  }
  bool take_line(std::string_view& line) {
    const void* end = left() == 0 ? nullptr : std::memchr(at_, '\n', left());
    if (end == nullptr) return fail("its line does not end");
    line = std::string_view(at_, static_cast<size_t>(static_cast<const char*>(end) - at_));
    at_ = static_cast<const char*>(end) + 1;
    return true;
  }
  template <class Length>
  bool take_counted(std::string_view& text) {
    Length length = 0;
    if (!take(length)) return false;
    if (length > left())
      return fail(fmt::format("it has {} bytes, but {} are left", length, left()));
    text = std::string_view(at_, static_cast<size_t>(length));
    at_ += text.size();
    return true;
  }

  // Of the stack.
  size_t fence() const { return marks_.empty() ? 0 : marks_.back(); }
  bool has(size_t values) const { return stack_.size() - fence() >= values; }
  PickleId pop() {
    const PickleId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  bool push(PickleId id) {
    stack_.push_back(id);
    return true;
  }
  PickleId make(const Node& node) {
    pickle_.nodes_.push_back(node);
    return static_cast<PickleId>(pickle_.nodes_.size() - 1);
  }
  bool push_new(Kind kind, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0, uint8_t flag = 0) {
    return push(make({kind, flag, 0, a, b, c}));
  }
  bool push_integer(int64_t value) {
    const uint64_t bits = static_cast<uint64_t>(value);
    return push_new(Kind::kInt, 0, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32));
  }
  bool push_number(double value) {
    const uint64_t bits = std::bit_cast<uint64_t>(value);
    return push_new(Kind::kFloat, 0, static_cast<uint32_t>(bits),
                    static_cast<uint32_t>(bits >> 32));
  }
  PickleId make_slice(Kind kind, std::string_view slice, uint8_t flag = 0) {
    return make({kind, flag, 0, static_cast<uint32_t>(slice.data() - begin_),
                 static_cast<uint32_t>(slice.size()), 0});
  }
  bool push_slice(Kind kind, std::string_view slice, uint8_t flag = 0) {
    return push(make_slice(kind, slice, flag));
  }
  bool push_text(std::string_view slice) {
    if (!is_ascii(slice) && !is_utf8(slice)) return fail("the text is not UTF-8");
    return push_slice(Kind::kText, slice);
  }
  bool push_decoded(size_t from) {
    const std::string_view text = std::string_view(pickle_.decoded_).substr(from);
    return push_new(is_utf8(text) ? Kind::kText : Kind::kBytes, static_cast<uint32_t>(from),
                    static_cast<uint32_t>(text.size()), 0, Pickle::kDecoded);
  }

  /// The values from `from` on, taken off the stack into a run of children.
  uint32_t take_children(size_t from) {
    const uint32_t first = static_cast<uint32_t>(pickle_.children_.size());
    for (size_t i = from; i < stack_.size(); ++i) pickle_.children_.push_back(stack_[i]);
    stack_.resize(from);
    return first;
  }
  bool make_sequence(Kind kind, size_t from) {
    const uint32_t count = static_cast<uint32_t>(stack_.size() - from);
    if (count == 0 && kind == Kind::kTuple) return push(kEmptyTupleId);
    const uint32_t first = take_children(from);
    return push_new(kind, first, count);
  }
  bool pop_mark(size_t& from) {
    if (marks_.empty()) return fail("there is no MARK for it");
    from = marks_.back();
    marks_.pop_back();
    return true;
  }

  /// Adds the values from `from` on to what `target` was given.
  bool change(PickleId target, Pickle::Change::Kind kind, size_t from) {
    const size_t count = stack_.size() - from;
    if (count == 0) return true;
    if (kind == Pickle::Change::Kind::kPairs && count % 2 != 0)
      return fail("a key without a value");
    Node& node = pickle_.nodes_[target];
    const bool fits = node.kind == Kind::kObject ||
                      (node.kind == Kind::kList && kind == Pickle::Change::Kind::kItems) ||
                      (node.kind == Kind::kSet && kind == Pickle::Change::Kind::kItems) ||
                      (node.kind == Kind::kDict && kind == Pickle::Change::Kind::kPairs);
    if (!fits) return fail("this cannot be done to " + pickle_.describe(target));
    const uint32_t first = take_children(from);
    if (node.c != 0) {  // more of the same right behind it
      Pickle::Segment& tail = pickle_.segments_[node.c];
      if (tail.kind == static_cast<uint32_t>(kind) && kind != Pickle::Change::Kind::kState &&
          tail.first + tail.count == first) {
        tail.count += static_cast<uint32_t>(count);
        return true;
      }
    }
    const uint32_t made = static_cast<uint32_t>(pickle_.segments_.size());
    pickle_.segments_.push_back(
        {static_cast<uint32_t>(kind), first, static_cast<uint32_t>(count), made});
    if (node.c != 0) std::swap(pickle_.segments_[made].next, pickle_.segments_[node.c].next);
    node.c = made;
    return true;
  }

  bool put(uint64_t index) {
    if (!has(1)) return fail("there is no value to remember");
    // Who writes pickles counts what is remembered, and that takes a byte each.
    if (index >= static_cast<uint64_t>(end_ - begin_))
      return fail(
          fmt::format("number {} in the memo of a pickle of {} bytes", index, end_ - begin_));
    if (index >= memo_.size()) memo_.resize(index + 1, kNothing);
    if (memo_[index] == kNothing) ++remembered_;
    memo_[index] = stack_.back();
    return true;
  }
  bool get(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNothing)
      return fail(fmt::format("nothing is number {} in the memo", index));
    return push(memo_[index]);
  }
  bool take_memo_number(uint64_t& index) {
    std::string_view line;
    if (!take_line(line)) return false;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), index);
    if (error != std::errc() || end != line.data() + line.size()) return fail("it has no number");
    return true;
  }

  /// A whole number of any length as two's complement.
  bool push_long(std::string_view bytes) {
    if (bytes.size() > 8) return push_slice(Kind::kLong, bytes);
    uint64_t value = 0;
    if (!bytes.empty()) {
      std::memcpy(&value, bytes.data(), bytes.size());
      const unsigned unused = 64 - 8 * static_cast<unsigned>(bytes.size());
      value = static_cast<uint64_t>(static_cast<int64_t>(value << unused) >> unused);
    }
    return push_integer(static_cast<int64_t>(value));
  }
  bool push_decimal(std::string_view line) {
    if (line.ends_with('L')) line.remove_suffix(1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    if (error == std::errc() && end == line.data() + line.size()) return push_integer(value);
    const std::string_view digits = line.substr(line.starts_with('-') ? 1 : 0);
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos)
      return fail("it is no number");
    return push_slice(Kind::kLong, line, Pickle::kDecimal);
  }

  bool push_global(std::string_view module, std::string_view name) {
    if (!is_utf8(module) || !is_utf8(name)) return fail("the name is not UTF-8");
    const PickleId a = make_slice(Kind::kText, module);
    return push_new(Kind::kGlobal, a, make_slice(Kind::kText, name));
  }
  bool make_object(PickleCall call) {
    if (!has(2)) return false;
    const PickleId arguments = pop();
    return push_new(Kind::kObject, pop(), arguments, 0, static_cast<uint8_t>(call));
  }

  bool step(uint8_t opcode);

  static constexpr PickleId kNothing = UINT32_MAX;
  Pickle pickle_;
  const char* begin_;
  const char* at_;
  const char* end_;
  const char* opcode_at_ = nullptr;
  std::vector<PickleId> stack_;
  std::vector<uint32_t> marks_;
  std::vector<PickleId> memo_;
  uint64_t remembered_ = 0;
  std::string problem_;
};

bool PickleParser::step(uint8_t opcode) {
  using Change = Pickle::Change::Kind;
  std::string_view text;
  size_t from = 0;
  uint64_t index = 0;
  switch (opcode) {
    case 'N':
      return push(kNoneId);
    case 0x88:
      return push(kTrueId);
    case 0x89:
      return push(kFalseId);
    case ')':
      return push(kEmptyTupleId);
    case ']':
      return push_new(Kind::kList);
    case '}':
      return push_new(Kind::kDict);
    case 0x8f:
      return push_new(Kind::kSet);
    case '(':
      marks_.push_back(static_cast<uint32_t>(stack_.size()));
      return true;

    case 'K': {
      uint8_t value = 0;
      return take(value) && push_integer(value);
    }
    case 'M': {
      uint16_t value = 0;
      return take(value) && push_integer(value);
    }
    case 'J': {
      int32_t value = 0;
      return take(value) && push_integer(value);
    }
    case 'G': {
      uint64_t bits = 0;
      return take(bits) && push_number(std::bit_cast<double>(__builtin_bswap64(bits)));
    }
    case 0x8a:
      return take_counted<uint8_t>(text) && push_long(text);
    case 0x8b:
      return take_counted<uint32_t>(text) && push_long(text);
    case 'I':
      if (!take_line(text)) return false;
      if (text == "00" || text == "01") return push(text == "01" ? kTrueId : kFalseId);
      return push_decimal(text);
    case 'L':
      return take_line(text) && push_decimal(text);
    case 'F': {
      double value = 0;
      if (!take_line(text)) return false;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || end != text.data() + text.size()) return fail("it is no number");
      return push_number(value);
    }

    case 'X':
      return take_counted<uint32_t>(text) && push_text(text);
    case 0x8c:
      return take_counted<uint8_t>(text) && push_text(text);
    case 0x8d:
      return take_counted<uint64_t>(text) && push_text(text);
    case 'B':
      return take_counted<uint32_t>(text) && push_slice(Kind::kBytes, text);
    case 'C':
      return take_counted<uint8_t>(text) && push_slice(Kind::kBytes, text);
    case 0x8e:
      return take_counted<uint64_t>(text) && push_slice(Kind::kBytes, text);
    case 0x96:
      return take_counted<uint64_t>(text) && push_slice(Kind::kByteArray, text);
    case 'T':
      return take_counted<uint32_t>(text) &&
             push_slice(is_utf8(text) ? Kind::kText : Kind::kBytes, text);
    case 'U':
      return take_counted<uint8_t>(text) &&
             push_slice(is_utf8(text) ? Kind::kText : Kind::kBytes, text);
    case 'S':
      if (!take_line(text)) return false;
      if (text.size() < 2 || text[0] != text.back() || (text[0] != '\'' && text[0] != '"'))
        return fail("it has no quotes");
      text = text.substr(1, text.size() - 2);
      from = pickle_.decoded_.size();
      return append_unescaped(text, pickle_.decoded_) ? push_decoded(from)
                                                      : fail("an escape that is none");
    case 'V':
      if (!take_line(text)) return false;
      from = pickle_.decoded_.size();
      return append_raw_unicode(text, pickle_.decoded_) ? push_decoded(from)
                                                        : fail("an escape that is none");

    case 't':
      return pop_mark(from) && make_sequence(Kind::kTuple, from);
    case 0x85:
      return has(1) && make_sequence(Kind::kTuple, stack_.size() - 1);
    case 0x86:
      return has(2) && make_sequence(Kind::kTuple, stack_.size() - 2);
    case 0x87:
      return has(3) && make_sequence(Kind::kTuple, stack_.size() - 3);
    case 0x91:
      return pop_mark(from) && make_sequence(Kind::kFrozenSet, from);
    case 'l':
    case 'd': {
      if (!pop_mark(from)) return false;
      const PickleId made = make({opcode == 'l' ? Kind::kList : Kind::kDict, 0, 0, 0, 0, 0});
      return change(made, opcode == 'l' ? Change::kItems : Change::kPairs, from) && push(made);
    }

    case 'a':
      return has(2) && change(stack_[stack_.size() - 2], Change::kItems, stack_.size() - 1);
    case 's':
      return has(3) && change(stack_[stack_.size() - 3], Change::kPairs, stack_.size() - 2);
    case 'b':
      if (!has(2)) return false;
      if (pickle_.kind(stack_[stack_.size() - 2]) != Kind::kObject)
        return fail("a state for " + pickle_.describe(stack_[stack_.size() - 2]));
      return change(stack_[stack_.size() - 2], Change::kState, stack_.size() - 1);
    case 'e':
    case 0x90:
    case 'u':
      if (!pop_mark(from) || from <= fence()) return false;
      if (opcode == 0x90 && pickle_.is(stack_[from - 1], Kind::kList))
        return fail("this cannot be done to a list");
      return change(stack_[from - 1], opcode == 'u' ? Change::kPairs : Change::kItems, from);

    case 'c': {
      std::string_view name;
      return take_line(text) && take_line(name) && push_global(text, name);
    }
    case 0x93: {
      if (!has(2)) return false;
      const PickleId name = pop(), module = pop();
      if (!pickle_.is(name, Kind::kText) || !pickle_.is(module, Kind::kText))
        return fail("a name that is no text");
      return push_new(Kind::kGlobal, module, name);
    }
    case 'R':
      return make_object(PickleCall::kReduce);
    case 0x81:
      return make_object(PickleCall::kNew);
    case 0x92:
      if (!has(3)) return false;
      return make_sequence(Kind::kTuple, stack_.size() - 2) && make_object(PickleCall::kNewKeyed);
    case 'o':
      if (!pop_mark(from) || stack_.size() <= from) return false;
      return make_sequence(Kind::kTuple, from + 1) && make_object(PickleCall::kOld);
    case 'i': {
      std::string_view name;
      if (!take_line(text) || !take_line(name) || !pop_mark(from)) return false;
      make_sequence(Kind::kTuple, from);
      const PickleId arguments = pop();
      return push_global(text, name) && push(arguments) && make_object(PickleCall::kOld);
    }
    case 'P': {
      if (!take_line(text)) return false;
      if (!is_utf8(text)) return fail("the text is not UTF-8");
      const PickleId id = make_slice(Kind::kText, text);
      return push_new(Kind::kPersistent, 0, id);
    }
    case 'Q':
      return has(1) && push_new(Kind::kPersistent, 0, pop());

    case 'q': {
      uint8_t number = 0;
      return take(number) && put(number);
    }
    case 'r': {
      uint32_t number = 0;
      return take(number) && put(number);
    }
    case 'p':
      return take_memo_number(index) && put(index);
    case 0x94:
      return put(remembered_);
    case 'h': {
      uint8_t number = 0;
      return take(number) && get(number);
    }
    case 'j': {
      uint32_t number = 0;
      return take(number) && get(number);
    }
    case 'g':
      return take_memo_number(index) && get(index);

    case '0':
      if (has(1)) return pop(), true;
      return pop_mark(from);
    case '1': {
      if (!pop_mark(from)) return false;
      stack_.resize(from);
      return true;
    }
    case '2':
      return has(1) && push(stack_.back());
    case 0x80: {
      uint8_t protocol = 0;
      if (!take(protocol)) return false;
      if (protocol > kHighestProtocol)
        return fail(
            fmt::format("protocol {} is unknown; 0 to {} are read", protocol, kHighestProtocol));
      pickle_.protocol_ = protocol;
      return true;
    }
    case 0x95: {
      uint64_t length = 0;
      if (!take(length)) return false;
      return length <= left() ||
             fail(fmt::format("a frame of {} bytes, but {} are left", length, left()));
    }
    case 0x82:
    case 0x83:
    case 0x84:
      return fail("numbers in Python's table of extensions are not read");
    case 0x97:
    case 0x98:
      return fail("its bytes are outside of the pickle (out-of-band), where nobody can find them");
    default:
      return fail("no pickle has this; it is damaged, or no pickle");
  }
}

Pickle::Pickle(std::string_view bytes)
    : bytes_(bytes),
      nodes_(bytes.size() + 8),
      children_(bytes.size() + 8),
      segments_(bytes.size() + 8) {
  for (PickleKind constant :
       {PickleKind::kNone, PickleKind::kFalse, PickleKind::kTrue, PickleKind::kTuple})
    nodes_.push_back({constant, 0, 0, 0, 0, 0});
  segments_.push_back({0, 0, 0, 0});
}

Result<Pickle> Pickle::parse(std::string_view bytes) { return PickleParser(bytes).parse(); }

double Pickle::number(PickleId id) const { return std::bit_cast<double>(nodes_[id].bc()); }

std::string_view Pickle::text(PickleId id) const {
  const Node& node = nodes_[id];
  return (node.flag & kDecoded ? std::string_view(decoded_) : bytes_).substr(node.a, node.b);
}

bool Pickle::is_global(PickleId id, std::string_view module, std::string_view name) const {
  return is(id, PickleKind::kGlobal) && this->name(id) == name && this->module(id) == module;
}

std::string Pickle::describe(PickleId id) const {
  switch (kind(id)) {
    case PickleKind::kNone:
      return "None";
    case PickleKind::kFalse:
      return "False";
    case PickleKind::kTrue:
      return "True";
    case PickleKind::kInt:
      return fmt::format("the number {}", integer(id));
    case PickleKind::kLong:
      return "a number of more than 64 bits";
    case PickleKind::kFloat:
      return fmt::format("the number {}", number(id));
    case PickleKind::kText:
      return fmt::format("the text {}", quoted(text(id).substr(0, 60)));
    case PickleKind::kBytes:
      return "bytes";
    case PickleKind::kByteArray:
      return "a bytearray";
    case PickleKind::kTuple:
      return "a tuple";
    case PickleKind::kList:
      return "a list";
    case PickleKind::kDict:
      return "a dict";
    case PickleKind::kSet:
      return "a set";
    case PickleKind::kFrozenSet:
      return "a frozenset";
    case PickleKind::kGlobal:
      return fmt::format("{}.{}", printable(module(id), 80), printable(name(id), 80));
    case PickleKind::kObject:
      return is(called(id), PickleKind::kGlobal) ? fmt::format("{}(…)", describe(called(id)))
                                                 : "an object";
    case PickleKind::kPersistent:
      return "a persistent id";
  }
  return "nothing";
}

}  // namespace ptc
