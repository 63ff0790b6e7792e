// Patterns for tensor names in rule sets: "layers.{layer}.self_attn.{q,k,v}_proj.{weight,bias}".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// What a name matched: the numbers that {layer} and {expert} stood for.
struct NameMatch {
  std::optional<uint32_t> layer;
  std::optional<uint32_t> expert;
  // Where {layer}'s digits are in the name, and {expert}'s; for renaming to and from a rank's own
  // numbers.
  size_t layer_begin = 0, layer_end = 0;
  size_t expert_begin = 0, expert_end = 0;
};

/// `*` stands for one or more characters other than '.'; `**` for any characters at all (also
/// none); {layer} and {expert} for decimal digits without superfluous leading zeros; {a,b,} for one
/// of the alternatives, which hold literal characters only. Everything else stands for itself. The
/// whole name must match; {layer} and {expert} may be in a pattern once each, and their numbers are
/// below 2³¹. Matching takes O(pattern × name) at worst, whatever the input; names of more than
/// kMaxNameLength bytes match nothing.
class NamePattern {
 public:
  static constexpr size_t kMaxNameLength = 4096;

  static Result<NamePattern> parse(std::string_view text);
  std::optional<NameMatch> match(std::string_view name) const;
  const std::string& text() const { return text_; }
  bool has_layer() const { return has_layer_; }
  /// It matches one name only, its text.
  bool is_literal() const { return text_.find_first_of("{*") == std::string::npos; }

 private:
  struct Token {
    enum class Kind { kLiteral, kStar, kDoubleStar, kLayer, kExpert, kAlternatives } kind;
    std::string literal;
    std::vector<std::string> alternatives;
  };
  class Parser;
  class Matcher;
  std::string text_;
  std::vector<Token> tokens_;
  bool has_layer_ = false;
};

}  // namespace ptc
