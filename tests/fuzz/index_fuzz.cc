// model.safetensors.index.json.
#include "fuzz.h"
#include "reshard/checkpoint/shard_index.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  auto index = parse_shard_index(input);
  if (!index) return check_error(index.error());
  for (const auto& [file, tensors] : index.value()) {
    PTC_CHECK(!tensors.empty());
    PTC_CHECK(!file.empty() && file[0] != '/' &&
              ("/" + file + "/").find("/../") == std::string::npos);
  }
}

std::vector<std::string> large_inputs() {
  std::string many = "{\"weight_map\":{";
  for (size_t i = 0; i < 50'000; ++i) many += fmt::format("\"t{}\":\"f{}\",", i, i);
  many.back() = '}';
  return {
      many + "}",
      repeated("", "[", kMegabyte),
      repeated("{\"weight_map\":", "{\"a\":", kMegabyte / 5),
      repeated("{\"metadata\":[0", ",0", kMegabyte / 2, "],\"weight_map\":{}}"),
      repeated("{\"weight_map\":{\"a\":\"b\"", ",\"a\":\"b\"", kMegabyte / 8, "}}"),
      repeated("{\"weight_map\":{\"a\":\"", "x", kMegabyte, "\"}}"),
  };
}

}  // namespace ptc::fuzz
