// A name pattern, a line end, and a name; tensor names as paths besides.
#include "fuzz.h"
#include "reshard/ptc/name_pattern.h"
#include "store/codec/tensor_path.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  const size_t line_end = std::min(input.find('\n'), input.size());
  const std::string_view text = input.substr(0, line_end);
  const std::string_view name = input.substr(std::min(line_end + 1, input.size()));

  if (auto path = tensor_path(name); !path) {
    check_error(path.error());
  } else {
    PTC_CHECK(tensor_name_of_path(path.value()).value() == name);
    for (std::string_view part : {"/../", "/./", "//"})
      PTC_CHECK(("/" + path.value() + "/").find(part) == std::string::npos);
    PTC_CHECK(path.value().find('\0') == std::string::npos);
  }
  if (auto from_path = tensor_name_of_path(name); !from_path) check_error(from_path.error());
  else PTC_CHECK(tensor_path(from_path.value()).value() == name);

  auto pattern = NamePattern::parse(text);
  if (!pattern) return check_error(pattern.error());
  PTC_CHECK(pattern.value().text() == text);
  const auto match = pattern.value().match(name);
  if (!match) return;
  PTC_CHECK(match->layer.has_value() == pattern.value().has_layer());
  if (match->layer)
    PTC_CHECK(name.substr(match->layer_begin, match->layer_end - match->layer_begin) ==
              std::to_string(*match->layer));
}

std::vector<std::string> large_inputs() {
  const std::string name(NamePattern::kMaxNameLength, 'a');
  return {
      repeated("", "**a", 333, "\n" + name),
      repeated("", "*", 1, repeated("", ".*", 490, "\n" + name)),
      repeated("", "{a,aa}", 160, "\n" + name + "b"),
      repeated("{layer}**{expert}", "**", 1, "\n" + std::string(NamePattern::kMaxNameLength, '1')),
      repeated("", "*", kMegabyte, "\n" + name),
      "**{a,aa}\n" + std::string(kMegabyte, 'a'),
      "{a" + std::string(900, ',') + "}\n" + name,
  };
}

}  // namespace ptc::fuzz
