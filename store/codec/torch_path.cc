#include "store/codec/torch_path.h"

#include <charconv>
#include <optional>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr char kHex[] = "0123456789ABCDEF";
constexpr char kLetters[] = {'\0', 'i', 'l', 't', 'd'};  // by TorchStep::Kind

bool is_escaped(char c) {
  return c == '%' || c == '.' || c == '/' || static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
}

bool has_key(const TorchStep& step) {
  return step.kind == TorchStep::Kind::kKey || step.kind == TorchStep::Kind::kTypesKey;
}

/// nullopt: it is none.
std::optional<std::string> parse_key(std::string_view text) {
  std::string key;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      if (is_escaped(text[i])) return std::nullopt;
      key += text[i];
      continue;
    }
    const std::string_view hex(kHex, 16);
    const size_t high = i + 2 < text.size() ? hex.find(text[i + 1]) : std::string_view::npos;
    const size_t low = i + 2 < text.size() ? hex.find(text[i + 2]) : std::string_view::npos;
    if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
    const char c = static_cast<char>(high * 16 + low);
    if (!is_escaped(c)) return std::nullopt;
    key += c;
    i += 2;
  }
  return key;
}

Result<TorchStep> parse_step(std::string_view text) {
  auto bad = [&] { return invalid_argument("{} is no step of a path", quoted(text)); };
  if (text == "%") return TorchStep{};
  if (text.empty()) return bad();
  for (const auto kind :
       {TorchStep::Kind::kNumberKey, TorchStep::Kind::kListIndex, TorchStep::Kind::kTupleIndex}) {
    if (text.size() < 3 || text[0] != '%' || text[1] != kLetters[static_cast<int>(kind)]) continue;
    TorchStep step{kind, {}, 0};
    const std::string_view digits = text.substr(2);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), step.number);
    if (error != std::errc() || std::to_string(step.number) != digits) return bad();
    if (kind != TorchStep::Kind::kNumberKey && step.number < 0) return bad();
    return step;
  }
  constexpr std::string_view kTypes = "%d";
  const bool types = text.starts_with(kTypes) && text.size() > kTypes.size();
  auto key = parse_key(types ? text.substr(kTypes.size()) : text);
  if (!key) return bad();
  return TorchStep{types ? TorchStep::Kind::kTypesKey : TorchStep::Kind::kKey, *std::move(key), 0};
}

}  // namespace

void append_torch_name(std::string& name, std::string_view step) {
  if (!name.empty()) name += '.';
  name += step;
}

void append_torch_key(std::string& text, std::string_view key, bool first) {
  if (!first) text += '.';
  if (key.empty()) text += '%';
  for (const char c : key) {
    if (!is_escaped(c)) text += c;
    else text += {'%', kHex[static_cast<unsigned char>(c) >> 4], kHex[c & 15]};
  }
}

std::string torch_name(std::span<const TorchStep> path) {
  std::string name;
  for (const TorchStep& step : path)
    append_torch_name(name, has_key(step) ? step.key : std::to_string(step.number));
  return name;
}

std::string torch_path_text(std::span<const TorchStep> path) {
  std::string text;
  bool first = true;
  for (const TorchStep& step : path) {
    if (step.kind == TorchStep::Kind::kTypesKey)
      append_torch_key(text.append(first ? "%d" : ".%d"), step.key, true);
    else if (step.kind == TorchStep::Kind::kKey) append_torch_key(text, step.key, first);
    else
      text.append(first ? "%" : ".%")
          .append(1, kLetters[static_cast<int>(step.kind)])
          .append(std::to_string(step.number));
    first = false;
  }
  return text;
}

Result<std::vector<TorchStep>> parse_torch_path(std::string_view text) {
  std::vector<TorchStep> path;
  while (!text.empty()) {
    const size_t dot = text.find('.');
    PTC_TRY(auto step, parse_step(text.substr(0, dot)));
    path.push_back(std::move(step));
    if (dot == text.size() - 1) return invalid_argument("the path ends with a dot");
    text = dot == std::string_view::npos ? std::string_view() : text.substr(dot + 1);
  }
  return path;
}

}  // namespace ptc
