// The manifest of a checkpoint: our own file, but a disk may have changed it.
#include "fuzz.h"
#include "reshard/checkpoint/manifest.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  auto parsed = Manifest::from_text(input);
  if (!parsed) return check_error(parsed.error());
  const Manifest& manifest = parsed.value();
  (void)manifest.tensor_facts();
  (void)manifest.element_bits();
  (void)manifest.model->check(manifest.written_spec);
  const std::string text = manifest.to_text();
  auto again = Manifest::from_text(text);
  PTC_CHECK(again.has_value() && again.value().to_text() == text);
}

std::vector<std::string> large_inputs() {
  return {
      repeated("", "[", kMegabyte),
      repeated("{\"tensors\":[0", ",0", kMegabyte / 2, "]}"),
  };
}

}  // namespace ptc::fuzz
