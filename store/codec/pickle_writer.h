// Pickles written with the opcodes that torch.load(weights_only=True) takes: those of protocol 2.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/codec/pickle.h"

namespace ptc {

/// Opcodes, one after the other; the caller knows what is on the stack.
class PickleWriter {
 public:
  PickleWriter() : out_("\x80\x02") {}
  void opcode(char code) { out_ += code; }
  void none() { opcode('N'); }
  void boolean(bool value) { opcode(value ? '\x88' : '\x89'); }
  void integer(int64_t value);
  void number(double value);
  void text(std::string_view value);   // UTF-8, less than 4 GiB
  void bytes(std::string_view value);  // as Python 3 does in protocol 2: encoded by a codec
  /// kInvalidArgument: a name with a line break, which protocol 2 cannot say.
  Result<> global(std::string_view module, std::string_view name);
  /// A global that is written often; `module` and `name` are literals.
  void known_global(const char* module, const char* name);
  /// A tuple of whole numbers.
  void numbers(const uint64_t* begin, const uint64_t* end);
  /// Remembers the top of the stack; get() brings it back.
  uint32_t put();
  void get(uint32_t number);
  std::string finish() &&;  // with STOP

 private:
  template <class Number>
  void raw(Number value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string out_;
  uint32_t remembered_ = 0;
  std::vector<std::pair<std::pair<const char*, const char*>, uint32_t>> known_;
};

/// What copy_pickle() does with a value.
struct PickleReplacement {
  enum class Kind : uint8_t {
    kKeep,   // writes it
    kOther,  // writes another value of the pickle in its place
    kTuple,  // it is a tuple, or what the persistent id has is one: the writer was given a MARK and
             // values, and now come its own from number `from` on
  } kind = Kind::kKeep;
  PickleId other = 0;
  size_t from = 0;
};
/// Asked once for each tuple, object and persistent id.
using PickleReplace = std::function<Result<PickleReplacement>(PickleId id, PickleWriter& writer)>;

/// Writes values of `pickle` one by one, among others. What several of them share is written once.
/// kInvalidArgument as of copy_pickle().
class PickleValues {
 public:
  /// Both must outlive it.
  PickleValues(const Pickle& pickle, PickleWriter& writer);
  ~PickleValues();
  PickleValues(PickleValues&&) noexcept;
  Result<> write(PickleId id);

 private:
  class Copier;
  std::unique_ptr<Copier> copier_;
};

/// Writes what `pickle` holds: the same values, and each once, as there; texts and numbers to the
/// last bit. kInvalidArgument: tuples or arguments that contain themselves, names with line breaks.
/// No recursion; memory: what it writes, and 6 bytes for each value.
Result<std::string> copy_pickle(const Pickle& pickle, const PickleReplace& replace = {});

}  // namespace ptc
