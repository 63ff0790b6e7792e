#include "dataset/plan/order_spec.h"

#include <algorithm>
#include <vector>

#include "store/base/json_settings.h"

namespace ptc {
namespace {

constexpr std::string_view kOrderFormat = "ptc-order/1";
constexpr size_t kMaxOrderBytes = 64 << 10;
constexpr Tail kTails[] = {Tail::kCarry, Tail::kShort, Tail::kDrop, Tail::kPad};

const std::vector<std::string> kOrderKeys = {"format", "seed",   "batch",  "tail", "shuffle",
                                             "assign", "uneven", "epochs", "round"};

/// Reads order.json; every error has its place.
class OrderParser : JsonSettings {
 public:
  OrderParser(std::string_view text, const json::object& object) : JsonSettings(text, object) {}

  Result<OrderSpec> parse() {
    PTC_TRY(check_keys(kOrderKeys));
    OrderSpec spec;
    if (!object_.contains("batch"))
      return error({}, "'batch' is missing: the samples of a global batch");
    PTC_TRY(number("seed", 0, UINT64_MAX, spec.seed));
    PTC_TRY(number("batch", 1, kMaxBatch, spec.batch));
    PTC_TRY(number("epochs", 1, kMaxEpochs, spec.epochs));
    PTC_TRY(words(spec));
    if (const json::value* uneven = object_.if_contains("uneven")) {
      if (!uneven->is_bool()) return error({"uneven"}, "'uneven' must be true or false");
      spec.uneven = uneven->get_bool();
    }
    return spec;
  }

 private:
  Result<> words(OrderSpec& spec) const {
    PTC_TRY(const auto format, word("format"));
    if (format && *format != kOrderFormat) {
      return error({"format"}, fmt::format("'format' must be \"{}\"", kOrderFormat));
    }
    PTC_TRY(const auto tail, word("tail"));
    if (tail) {
      const auto* found = std::find_if(std::begin(kTails), std::end(kTails),
                                       [&](Tail value) { return tail_name(value) == *tail; });
      if (found == std::end(kTails)) {
        return error({"tail"}, "'tail' must be \"carry\", \"short\", \"drop\" or \"pad\"");
      }
      spec.tail = *found;
    }
    PTC_TRY(const auto shuffle, word("shuffle"));
    if (shuffle) {
      auto parsed = Shuffle::parse(*shuffle);
      if (!parsed) return error({"shuffle"}, "'shuffle' " + parsed.error().message());
      spec.shuffle = parsed.value();
    }
    PTC_TRY(const auto assign, word("assign"));
    if (assign) {
      auto parsed = Assign::parse(*assign);
      if (!parsed) return error({"assign"}, "'assign' " + parsed.error().message());
      spec.assign = parsed.value();
    }
    PTC_TRY(const auto round, word("round"));
    if (round && *round != "down") return error({"round"}, "'round' can only be \"down\"");
    spec.round_down = round.has_value();
    return ok();
  }
};

}  // namespace

std::string_view tail_name(Tail tail) {
  switch (tail) {
    case Tail::kShort:
      return "short";
    case Tail::kDrop:
      return "drop";
    case Tail::kPad:
      return "pad";
    case Tail::kCarry:
      break;
  }
  return "carry";
}

std::string Assign::name() const {
  if (kind == Kind::kMicro) return fmt::format("micro:{}", micro);
  return kind == Kind::kStride ? "stride" : "contig";
}

Result<Assign> Assign::parse(std::string_view text) {
  if (text == "contig") return Assign{};
  if (text == "stride") return Assign{.kind = Kind::kStride};
  if (const auto micro = samples_after("micro:", text, kMaxBatch)) {
    if (*micro > 0) return Assign{.kind = Kind::kMicro, .micro = *micro};
    return invalid_argument("{}: the micro-batch must be a whole number of samples from 1 to {}",
                            quoted(text), kMaxBatch);
  }
  return invalid_argument(
      "must be \"contig\", \"stride\" or \"micro:M\" (M samples a micro-batch)");
}

Result<OrderSpec> OrderSpec::parse(std::string_view text) {
  PTC_TRY(const json::value value, parse_json(text, {.max_bytes = kMaxOrderBytes}));
  if (!value.is_object()) {
    return invalid_argument("{}: an order is a JSON object: {{ … }}", json_place(text, {}));
  }
  return OrderParser(text, value.get_object()).parse();
}

Result<> OrderSpec::check(uint64_t dp, std::optional<uint64_t> samples) const {
  if (batch < dp) {
    return invalid_argument(
        "a global batch of {} is less than a sample for each of {} data-parallel ranks", batch, dp);
  }
  if (batch % dp != 0 && !uneven) {
    return invalid_argument(
        "a global batch of {} does not divide among {} data-parallel ranks: the nearest that do "
        "are {} and {}; "
        "or say \"uneven\": true, and weight the gradients",
        batch, dp, batch - batch % dp, batch - batch % dp + dp);
  }
  if (batch % dp != 0 && assign.kind != Assign::Kind::kContig) {
    return invalid_argument(
        "\"assign\": \"{}\" needs a batch that divides among the {} data-parallel ranks; "
        "\"contig\" does not",
        assign.name(), dp);
  }
  if (assign.kind == Assign::Kind::kMicro && batch / dp % assign.micro != 0) {
    return invalid_argument(
        "each of {} ranks gets {} of a global batch of {}, which are not whole micro-batches of {}",
        dp, batch / dp, batch, assign.micro);
  }
  if (batch / dp > kMaxLocalBatch) {
    return invalid_argument(
        "each of {} ranks gets {} of a global batch of {}: at most {} can be shown as one file", dp,
        batch / dp, batch, kMaxLocalBatch);
  }
  if (!samples) return ok();
  if (tail == Tail::kPad && batch > std::max(*samples, kMaxLocalBatch)) {
    return invalid_argument(
        "an epoch of {} samples would be repeated {} times to fill up a global batch of {}: "
        "\"tail\": \"pad\" repeats "
        "at most {}",
        *samples, batch / *samples, batch, std::max(*samples, kMaxLocalBatch));
  }
  if (tail == Tail::kDrop && batch > *samples) {
    return invalid_argument(
        "an epoch of {} samples has no global batch of {}: \"tail\": \"drop\" leaves nothing",
        *samples, batch);
  }
  if (*samples > kMaxSamples / epochs) {
    return invalid_argument("{} epoch{} of {} samples are more than can be counted", epochs,
                            epochs == 1 ? "" : "s", *samples);
  }
  return ok();
}

}  // namespace ptc
