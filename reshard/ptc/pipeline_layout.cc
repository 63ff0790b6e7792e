#include "reshard/ptc/pipeline_layout.h"

#include <charconv>
#include <utility>

namespace ptc {
namespace {

constexpr uint32_t kMostTimes = 1 << 20;
constexpr uint64_t kMostParts = UINT32_MAX;
constexpr int kMostNested = 16;

using Stages = std::vector<StageParts>;  // at least one

class PipelineLayoutParser {
 public:
  PipelineLayoutParser(std::string_view text, size_t most) : text_(text), most_(most) {}

  Result<Stages> parse() {
    PTC_TRY(Stages stages, sequence(0));
    if (at_ < text_.size()) return error("')' closes nothing");
    return stages;
  }

 private:
  Error error(std::string_view what) const {
    return invalid_argument("at character {}: {}", at_ + 1, what);
  }

  Result<Stages> sequence(int nested) {
    Stages all(1);
    for (; at_ < text_.size() && text_[at_] != ')';) {
      const char c = text_[at_];
      if (c == ',' || c == ' ') {
        ++at_;
        continue;
      }
      PTC_TRY(const Stages one, element(nested));
      PTC_TRY(const uint32_t times, repetitions());
      // One that ends no stage is added as often at once; the others are soon too many.
      const bool at_once = one.size() == 1;
      for (uint32_t i = 0; i < (at_once ? 1 : times); ++i) {
        PTC_TRY(append(all, one, at_once ? times : 1));
      }
    }
    return all;
  }

  Result<Stages> element(int nested) {
    Stages one(1);
    switch (text_[at_]) {
      case '|':
        one.resize(2);
        break;
      case 'E':
        one[0].embeddings = 1;
        break;
      case 't':
        one[0].layers = 1;
        break;
      case 'm':
        one[0].mtp = 1;
        break;
      case 'L':
        one[0].heads = 1;
        break;
      case '(': {
        if (nested == kMostNested) return error("too many parentheses in each other");
        ++at_;
        PTC_TRY(one, sequence(nested + 1));
        if (at_ == text_.size()) return error("')' is missing");
        break;
      }
      default:
        return error("expected E, t, m, L, |, or a group in parentheses");
    }
    ++at_;
    return one;
  }

  Result<uint32_t> repetitions() {
    if (at_ == text_.size() || text_[at_] != '*') return 1;
    uint32_t times = 0;
    const char* const begin = text_.data() + at_ + 1;
    const auto [end, failed] = std::from_chars(begin, text_.data() + text_.size(), times);
    if (failed != std::errc() || times == 0 || times > kMostTimes) {
      ++at_;
      return error(fmt::format("'*' wants a number from 1 to {} behind it", kMostTimes));
    }
    at_ = static_cast<size_t>(end - text_.data());
    return times;
  }

  /// The first stage of `more` goes on with the last of `all`.
  Result<> append(Stages& all, const Stages& more, uint32_t times) const {
    StageParts& last = all.back();
    last.layers += more[0].layers * times;
    last.embeddings += more[0].embeddings * times;
    last.heads += more[0].heads * times;
    last.mtp += more[0].mtp * times;
    for (const uint64_t parts : {last.layers, last.embeddings, last.heads, last.mtp})
      if (parts > kMostParts) return error("a stage has too many layers");
    if (all.size() + more.size() - 1 > most_)
      return error(fmt::format("there are more than {} stages", most_));
    all.insert(all.end(), more.begin() + 1, more.end());
    return ok();
  }

  const std::string_view text_;
  const size_t most_;
  size_t at_ = 0;
};

}  // namespace

Result<std::vector<StageParts>> parse_pipeline_layout(std::string_view text, size_t most) {
  return PipelineLayoutParser(text, most).parse();
}

}  // namespace ptc
