// layout.json.
#include <boost/json/object.hpp>

#include "fuzz.h"
#include "reshard/ptc/layout.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  auto named = LayoutSpec::from_name(input.substr(0, 200));
  if (named) PTC_CHECK(named.value().name() == input);
  else check_error(named.error());

  auto layout = Layout::parse(input);
  if (!layout) return check_error(layout.error());
  const LayoutSpec& spec = layout.value().spec;
  auto again = LayoutSpec::from_json(spec.to_json());
  PTC_CHECK(again.has_value() && again.value() == spec && again.value().name() == spec.name());
  for (uint64_t rank : {uint64_t{0}, spec.sizes.world_size() / 2, spec.sizes.world_size() - 1})
    PTC_CHECK(spec.order.global_rank(spec.sizes, spec.coords(rank)) == rank);
  auto boundaries = stage_boundaries(spec, 40);
  if (!boundaries) return check_error(boundaries.error());
  PTC_CHECK(boundaries.value().size() == size_t{spec.chunks()} + 1 &&
            boundaries.value().back() == 40);
}

std::vector<std::string> large_inputs() {
  return {
      repeated("", "[", kMegabyte),
      repeated("", "{\"a\":", kMegabyte / 5),
      repeated("{\"tp\":1", ",\"x\":0", kMegabyte / 6, "}"),
      repeated("{\"tp\":1,\"pp\":1,\"dp\":1,\"devices\":[0", ",0", kMegabyte / 2 - 30, "]}"),
      repeated("{\"tp\":1,\"pp\":50000,\"dp\":1,\"stages\":[1", ",1", 49999, "]}"),
      repeated("{\"", "x", kMegabyte - 20, "\":1}"),
      repeated("{\"order\":\"", "tp-", kMegabyte / 3 - 20, "\"}"),
      repeated("{\"tp\":", "9", kMegabyte - 20, "}"),
      repeated("", "\n", kMegabyte - 1, "{"),
  };
}

}  // namespace ptc::fuzz
