#include "reshard/ptc/name_pattern.h"

#include <algorithm>
#include <array>

#include "store/base/json.h"
namespace ptc {
namespace {

constexpr size_t kMaxPatternLength = 1000;
constexpr uint64_t kMaxNumber = (uint64_t{1} << 31) - 1;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

class NamePattern::Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) { pattern_.text_ = text; }

  Result<NamePattern> parse() {
    if (text_.empty()) return invalid_argument("a name pattern is empty");
    if (text_.size() > kMaxPatternLength) {
      return invalid_argument("a name pattern has {} characters; at most {} are allowed",
                              text_.size(), kMaxPatternLength);
    }
    for (size_t i = 0; i < text_.size();) {
      const char c = text_[i];
      if (c == '*') {
        size_t stars = 0;
        while (i < text_.size() && text_[i] == '*') ++i, ++stars;
        if (stars > 2) return error("has more than two '*' in a row");
        push(stars == 1 ? Token::Kind::kStar : Token::Kind::kDoubleStar);
      } else if (c == '{') {
        const size_t end = text_.find('}', i);
        if (end == std::string_view::npos) return error("has a '{' without its '}'");
        PTC_TRY(braces(text_.substr(i + 1, end - i - 1)));
        i = end + 1;
      } else if (c == '}') {
        return error("has a '}' without its '{'");
      } else {
        literal() += c;
        ++i;
      }
    }
    return std::move(pattern_);
  }

 private:
  template <class Why>
  Error error(const Why& why) const {
    return invalid_argument("name pattern {} {}", quoted(text_), why);
  }

  Token& push(Token::Kind kind) {
    pattern_.tokens_.push_back(Token{kind, {}, {}});
    return pattern_.tokens_.back();
  }

  std::string& literal() {
    auto& tokens = pattern_.tokens_;
    if (tokens.empty() || tokens.back().kind != Token::Kind::kLiteral) {
      push(Token::Kind::kLiteral);
    }
    return tokens.back().literal;
  }

  Result<> braces(std::string_view inside) {
    if (inside == "layer" || inside == "expert") {
      const bool layer = inside == "layer";
      bool& seen = layer ? pattern_.has_layer_ : has_expert_;
      if (seen) return error(fmt::format("has {{{}}} twice", inside));
      seen = true;
      push(layer ? Token::Kind::kLayer : Token::Kind::kExpert);
      return ok();
    }
    if (inside.find(',') == std::string_view::npos) {
      return error(
          fmt::format("has {}, which is neither {{layer}} nor {{expert}} nor a list "
                      "of alternatives such as {{weight,bias}}",
                      quoted(fmt::format("{{{}}}", inside))));
    }
    if (inside.find_first_of("{*") != std::string_view::npos) {
      return error("has '*' or '{' inside of alternatives, which hold plain characters only");
    }
    Token& token = push(Token::Kind::kAlternatives);
    for (size_t begin = 0; begin <= inside.size();) {
      const size_t end = std::min(inside.find(',', begin), inside.size());
      token.alternatives.emplace_back(inside.substr(begin, end - begin));
      begin = end + 1;
    }
    return ok();
  }

  std::string_view text_;
  NamePattern pattern_;
  bool has_expert_ = false;
};

Result<NamePattern> NamePattern::parse(std::string_view text) { return Parser(text).parse(); }

/// Fills, from the last token to the first, which tokens can match from which position on, and then
/// walks forward along what can.
class NamePattern::Matcher {
 public:
  Matcher(const std::vector<Token>& tokens, std::string_view name)
      : tokens_(tokens), name_(name), width_(name.size() + 1) {
    const size_t cells = (tokens.size() + 1) * width_;
    if (cells > small_.size()) {
      large_.resize(cells);
      cells_ = large_.data();
    } else {
      std::fill_n(small_.data(), cells, 0);
      cells_ = small_.data();
    }
  }

  std::optional<NameMatch> match() {
    can(tokens_.size(), name_.size()) = 1;
    for (size_t t = tokens_.size(); t-- > 0;) {
      bool any = false;
      for (size_t at = width_; at-- > 0;) {
        const bool matches = fill(t, at);
        can(t, at) = matches;
        any |= matches;
      }
      if (!any) return std::nullopt;
    }
    if (!can(0, 0)) return std::nullopt;
    return walk();
  }

 private:
  using Kind = Token::Kind;
  char& can(size_t token, size_t at) { return cells_[token * width_ + at]; }

  bool fill(size_t t, size_t at) {
    const Token& token = tokens_[t];
    const bool end = at == name_.size();
    switch (token.kind) {
      case Kind::kLiteral:
        return follows(t, at, token.literal);
      case Kind::kAlternatives:
        return std::any_of(token.alternatives.begin(), token.alternatives.end(),
                           [&](const std::string& word) { return follows(t, at, word); });
      case Kind::kStar:
        return !end && name_[at] != '.' && (can(t + 1, at + 1) || can(t, at + 1));
      case Kind::kDoubleStar:
        return can(t + 1, at) || (!end && can(t, at + 1));
      case Kind::kLayer:
      case Kind::kExpert:
        break;
    }
    return number_end(t, at) != 0;
  }

  bool follows(size_t t, size_t at, std::string_view word) {
    // What comes behind can match at few places: that is asked first.
    return word.size() <= name_.size() - at && can(t + 1, at + word.size()) &&
           name_.substr(at).starts_with(word);
  }

  /// The end of the longest number at `at` behind which the rest can match; 0: none.
  size_t number_end(size_t t, size_t at, uint64_t* number = nullptr) {
    size_t best = 0;
    uint64_t value = 0;
    for (size_t end = at; end < name_.size() && is_digit(name_[end]);) {
      if (end > at && name_[at] == '0') break;
      value = value * 10 + static_cast<uint64_t>(name_[end] - '0');
      if (value > kMaxNumber) break;
      ++end;
      if (!can(t + 1, end)) continue;
      best = end;
      if (number) *number = value;
    }
    return best;
  }

  NameMatch walk() {
    NameMatch match;
    size_t at = 0;
    for (size_t t = 0; t < tokens_.size(); ++t) {
      const Token& token = tokens_[t];
      switch (token.kind) {
        case Kind::kLiteral:
          at += token.literal.size();
          break;
        case Kind::kAlternatives:
          at += std::find_if(token.alternatives.begin(), token.alternatives.end(),
                             [&](const std::string& word) { return follows(t, at, word); })
                    ->size();
          break;
        case Kind::kStar:
          ++at;
          [[fallthrough]];
        case Kind::kDoubleStar:
          while (!can(t + 1, at)) ++at;
          break;
        case Kind::kLayer:
        case Kind::kExpert: {
          uint64_t number = 0;
          const size_t end = number_end(t, at, &number);
          if (token.kind == Kind::kLayer) {
            match.layer = static_cast<uint32_t>(number);
            match.layer_begin = at;
            match.layer_end = end;
          } else {
            match.expert = static_cast<uint32_t>(number);
            match.expert_begin = at;
            match.expert_end = end;
          }
          at = end;
          break;
        }
      }
    }
    return match;
  }

  const std::vector<Token>& tokens_;
  std::string_view name_;
  size_t width_;
  std::array<char, 2048> small_;
  std::vector<char> large_;
  char* cells_ = nullptr;
};

std::optional<NameMatch> NamePattern::match(std::string_view name) const {
  if (name.size() > kMaxNameLength) return std::nullopt;
  const Token& first = tokens_.front();
  const Token& last = tokens_.back();
  if (first.kind == Token::Kind::kLiteral && !name.starts_with(first.literal)) return std::nullopt;
  if (last.kind == Token::Kind::kLiteral && !name.ends_with(last.literal)) return std::nullopt;
  return Matcher(tokens_, name).match();
}

}  // namespace ptc
