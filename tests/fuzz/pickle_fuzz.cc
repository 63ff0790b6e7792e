// A pickle.
#include "fuzz.h"
#include "pickle_json.h"
#include "store/base/utf8.h"
#include "store/codec/pickle.h"
#include "store/codec/pickle_writer.h"

namespace ptc::fuzz {
namespace {

constexpr size_t kSmall = 16 << 10;

/// What is written again is read as the same, but for what protocol 2 has no opcodes for.
void check_copy(const Pickle& pickle) {
  auto copy = copy_pickle(pickle);
  if (!copy) return check_error(copy.error());
  auto again = Pickle::parse(copy.value());
  PTC_CHECK(again.has_value());
  for (PickleId id = 0; id < pickle.size(); ++id) {
    switch (pickle.kind(id)) {
      case PickleKind::kBytes:
      case PickleKind::kByteArray:
      case PickleKind::kSet:
      case PickleKind::kFrozenSet:
        return;
      default:
        break;
    }
  }
  constexpr size_t kDepth = 30, kValues = 2000;
  PTC_CHECK(pickle_json(pickle, pickle.root(), kDepth, kValues) ==
            pickle_json(again.value(), again.value().root(), kDepth, kValues));
}

}  // namespace

void run(std::string_view input) {
  auto parsed = Pickle::parse(input);
  if (!parsed) return check_error(parsed.error());
  const Pickle& pickle = parsed.value();
  PTC_CHECK(pickle.length_bytes() <= input.size() && input[pickle.length_bytes() - 1] == '.');
  PTC_CHECK(pickle.root() < pickle.size());
  PTC_CHECK(pickle.size() <= 4 + 3 * input.size());
  auto known = [&](PickleId id) -> Result<> {
    PTC_CHECK(id < pickle.size());
    return ok();
  };
  for (PickleId id = 0; id < pickle.size(); ++id) {
    check_error(invalid_argument("{}", pickle.describe(id)));
    switch (pickle.kind(id)) {
      case PickleKind::kText:
        PTC_CHECK(is_utf8(pickle.text(id)));
        break;
      case PickleKind::kGlobal:
        PTC_CHECK(is_utf8(pickle.module(id)) && is_utf8(pickle.name(id)));
        break;
      case PickleKind::kObject:
        PTC_CHECK(pickle.called(id) < id && pickle.arguments(id) < id);
        PTC_CHECK(pickle
                      .for_pairs(id,
                                 [&](PickleId key, PickleId value) -> Result<> {
                                   PTC_TRY(known(key));
                                   return known(value);
                                 })
                      .has_value());
        PTC_CHECK(pickle.for_states(id, known).has_value());
        break;
      case PickleKind::kTuple:
        for (size_t i = 0; i < pickle.tuple_size(id); ++i) PTC_CHECK(pickle.element(id, i) < id);
        break;
      default:
        break;
    }
    PTC_CHECK(pickle.for_items(id, known).has_value());
  }
  if (input.size() < kSmall) check_copy(pickle);
}

std::vector<std::string> large_inputs() {
  using namespace std::string_literals;
  std::vector<std::string> inputs;
  for (const char* constant : {"N", "]", "}", ")", "(", "\x8f", "K\1", "U\1a", "cm\nn\n",
                               "S'\\n'\n", "V\xe9\n", "I1\n", "Pa\n"})
    inputs.push_back(repeated("", constant, kMegabyte / std::string_view(constant).size(), "."));
  for (const char* again : {"\x85", "\x94", "2", "2\x86", "Q", "NR", "N\x81", "]\x94", "(t", "(l",
                            "(d", "(\x91", "h\1\x85", "h\1q\1"})
    inputs.push_back(repeated("Nq\1", again, kMegabyte / std::string_view(again).size(), "."));
  for (const char* more : {"Na", "(Ne", "NNs", "(NNu", "Nb",
                           "N\x85q\2h\2\x86"
                           "a",
                           "NaNNs", "(N\x90"})
    inputs.push_back(repeated("cm\nn\n)R", more, kMegabyte / std::string_view(more).size(), "."));
  inputs.push_back(repeated("", "]", kMegabyte / 2, repeated("", "a", kMegabyte / 2 - 1, ".")));
  inputs.push_back(repeated("", "(", kMegabyte / 2, repeated("", "t", kMegabyte / 2, ".")));
  inputs.push_back("Nr" + std::string("\xf0\xff\x0f\x00", 4) + std::string(kMegabyte, 'N') + ".");
  return inputs;
}

}  // namespace ptc::fuzz
