// What a data set says about itself.
#include <boost/json/object.hpp>

#include "dataset/run/data_set_impl.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr size_t kMostSkippedListed = 100;
constexpr std::chrono::minutes kReadErrorsAreShown{10};

json::object source_json(const SampleSource& source) {
  json::object object{{"format", format_name(source.format())},
                      {"samples", source.samples()},
                      {"bytes", source.bytes()},
                      {"fingerprint", fmt::format("{:016x}", source.fingerprint())},
                      {"index_bytes", source.index_bytes()},
                      {"shards_skipped", source.skipped().size()}};
  json::array skipped;
  for (const SkippedShard& shard : source.skipped()) {
    if (skipped.size() == kMostSkippedListed) break;
    skipped.push_back(json::object{{"shard", printable(shard.path, 4096)},
                                   {"why", printable(shard.reason, 4096)}});
  }
  if (!skipped.empty()) object["skipped"] = std::move(skipped);
  return object;
}

}  // namespace

std::string DataSet::Impl::why_nothing_is_shown() const {
  const auto order = OrderSpec::parse(state.order.value_or(""));
  if (!order) return "order.json: " + order.error().message();
  if (state.plan && source != nullptr && !source->has_fingerprint(state.plan->run().fingerprint))
    return fmt::format(
        "the shards of source.json are not those that the run began with (fingerprint {:016x}, now "
        "{:016x})",
        state.plan->run().fingerprint, source->fingerprint());
  return "what all nodes agree on does not make a run; save order.json again";
}

std::string DataSet::plan_json() const {
  std::optional<RunPlan> plan;
  uint64_t consumed = 0;
  {
    MutexLock lock(impl_->mutex);
    plan = impl_->state.plan;
    consumed = impl_->state.consumed;
  }
  return plan ? plan->to_plan_json(consumed) : "{}\n";
}

std::string_view DataSet::Impl::state_now(std::string* error) const {
  std::string_view now = "ready";
  if (!state.source) now = "no source.json";
  else if (indexing || state.source != indexed_text) now = "indexing";
  else if (source == nullptr) now = "refused";
  else if (!state.order) now = "no order.json";
  else if (shown.empty()) now = "refused";
  else if (!pending.empty()) now = "waiting";
  *error = refused;
  if (error->empty()) *error = index_error;
  if (error->empty()) *error = pending;
  if (now != "refused" || !error->empty()) return now;
  if (look_wanted || looking) return "indexing";  // what follows from the index is not decided yet
  *error = why_nothing_is_shown();
  return now;
}

std::vector<std::string_view> DataSet::Impl::read_errors_now() const {
  std::vector<std::string_view> errors;
  const auto forgotten = std::chrono::steady_clock::now() - kReadErrorsAreShown;
  for (const ReadError& one : read_errors)
    if (one.last >= forgotten) errors.push_back(one.what);
  return errors;
}

std::optional<DataSetNumbers> DataSet::numbers() const {
  const Impl& impl = *impl_;
  MutexLock lock(impl.mutex);
  if (!impl.state.source && !impl.state.order) return std::nullopt;
  DataSetNumbers numbers;
  std::string ignored;
  numbers.state = impl.state_now(&ignored);
  numbers.read_errors = impl.read_errors_now().size();
  numbers.consumed = impl.state.consumed;
  if (!impl.state.plan) return numbers;
  const RunPlan& plan = *impl.state.plan;
  const Segment& last = plan.last();
  numbers.run = {plan.run().samples, plan.end(), last.batch, last.dp, last.generation, 0};
  const Segment* before = nullptr;
  for (const Segment& segment : plan.segments()) {
    if (before != nullptr && before->dp != segment.dp) ++numbers.run->dp_changes;
    before = &segment;
  }
  return numbers;
}

std::string DataSet::status_json() const {
  const Impl& impl = *impl_;
  MutexLock lock(impl.mutex);
  std::string error;
  json::object object{{"state", impl.state_now(&error)}};
  object["error"] = error.empty() ? json::value(nullptr) : json::value(printable(error, 4096));
  if (impl.indexing) {
    const IndexProgress& progress = *impl.progress;
    object["index"] = json::object{{"shards", progress.shards.load()},
                                   {"shards_done", progress.shards_done.load()},
                                   {"bytes", progress.bytes.load()},
                                   {"bytes_done", progress.bytes_done.load()},
                                   {"samples", progress.samples.load()}};
  }
  if (impl.source != nullptr) object["source"] = source_json(*impl.source);
  object["consumed"] = impl.state.consumed;
  if (impl.state.plan) {
    object["end"] = impl.state.plan->end();
    object["generation"] = generation_name(impl.state.plan->last().generation);
    object["batch"] = impl.state.plan->last().batch;
    object["dp"] = impl.state.plan->last().dp;
  }
  json::array read_errors;
  for (const std::string_view what : impl.read_errors_now())
    read_errors.push_back(json::string(printable(what, 4096)));
  if (!read_errors.empty()) object["read_errors"] = std::move(read_errors);
  return pretty_json(object);
}

}  // namespace ptc
