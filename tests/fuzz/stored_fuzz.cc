// Where a checkpoint's bytes lie: our own file, but a disk may have changed it, and other nodes
// send theirs.
#include "fuzz.h"
#include "tests/support/small_checkpoint.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  static SharedResults results;
  static const std::shared_ptr<Checkpoint> checkpoint = testing::small_checkpoint(results);
  auto stored = StoredText::from_text(input);
  if (!stored) return check_error(stored.error());
  constexpr uint32_t kFewStates = 64;  // more cost what it takes to describe them
  if (state_count(stored.value().spec) > kFewStates) return;
  const size_t images = stored.value().images.size();
  auto made = checkpoint->make_stored(stored.value().spec, std::move(stored.value().images));
  if (!made) return check_error(made.error());
  (void)made.value()->index();
  (void)made.value()->find(0, "model.safetensors");
  const auto again = StoredText::from_text(made.value()->to_text());
  PTC_CHECK(again.has_value() && again.value().images.size() == images);
}

std::vector<std::string> large_inputs() {
  return {
      repeated("", "[", kMegabyte),
      repeated("{\"spec\":{\"tp\":2},\"images\":[0", ",0", kMegabyte / 2, "]}"),
      repeated("{\"spec\":{\"tp\":2},\"images\":[{\"id\":\"", "x", kMegabyte, "\"}]}"),
  };
}

}  // namespace ptc::fuzz
