#include "dataset/run/data_set.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>

#include "dataset/run/data_set_impl.h"
#include "dataset/source/caught.h"
#include "dataset/source/shard_list.h"
#include "store/base/decimal.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(500);  // where the metadata did not answer
constexpr auto kLoads = std::chrono::seconds(5);
constexpr auto kCatchesUp = std::chrono::seconds(1);
constexpr auto kIndexingEnds = std::chrono::seconds(2);
constexpr size_t kMostReadErrors = 16;

uint64_t nanoseconds_now() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

Result<uint64_t> parse_consumed(std::string_view text) {
  const std::optional<uint64_t> count = parse_count(text);
  if (!count)
    return invalid_argument("consumed: {} is not a count of samples in decimal digits",
                            quoted(text));
  return *count;
}

std::string generation_name(uint64_t number) { return fmt::format("{:06}", number); }

DataSet::Impl::~Impl() {
  follower.stop();
  watch.reset();
  dp_watch.reset();
  end_indexing();
}

void DataSet::Impl::start(StepPool& pool) {
  follower.start(pool, [this](const std::stop_token&) { return follow(); });
}

Result<> DataSet::Impl::watch_metadata() {
  auto again = [this](const MetaEvent&) { want_look(); };
  if (watch == nullptr) {
    PTC_TRY(watch, options.meta->watch(record.prefix(), again));
  }
  if (dp_watch == nullptr && !options.dp_key.empty()) {
    PTC_TRY(dp_watch, options.meta->watch(options.dp_key, again));
  }
  return ok();
}

void DataSet::Impl::want_look() {
  MutexLock lock(mutex);
  look_wanted = true;
  follower.wake();
}

void DataSet::Impl::set_refused(std::string what) {
  MutexLock lock(mutex);
  refused = std::move(what);
}

Result<> DataSet::Impl::bring_up_to_date(DataSetState& now) const {
  const std::optional<OrderSpec> order = now.order_spec();
  SampleSourceRef known;
  DataParallel dp;
  {
    MutexLock lock(mutex);
    // What is shown while it is looked at anew may be of what was there before.
    if (now.source && now.source == indexed_text && now.saved == indexed_saved && !indexing)
      known = source;
    dp = now.dp_now(seen);
  }
  if (!order) return ok();
  if (!now.plan && known == nullptr) return order->check(dp.ranks, std::nullopt);
  const bool other_samples = now.plan && known != nullptr &&
                             (!known->has_fingerprint(now.plan->run().fingerprint) ||
                              known->samples() != now.plan->run().samples);
  if (other_samples && now.consumed > 0) {
    return invalid_argument(
        "source.json: these shards hold {} samples, and are not those of which {} are consumed ({} "
        "samples, "
        "fingerprint {:016x}): name the former shards again, or begin another job{}",
        known->samples(), now.consumed, now.plan->run().samples, now.plan->run().fingerprint,
        known->samples() == now.plan->run().samples
            ? " (a run that began with \"fingerprint\": \"content\" goes on with that)"
            : "");
  }
  if (!now.plan || other_samples) {
    const uint64_t number = now.plan ? now.plan->next_generation() : 1;
    PTC_TRY(now.plan,
            RunPlan::begin(*order, known->samples(), known->fingerprint(), dp.ranks, number));
  } else {
    PTC_TRY(RunPlan::Changed next, now.plan->change(*order, dp.ranks, now.consumed));
    now.plan = std::move(next.plan);
    now.consumed = next.consumed;
  }
  now.dp = dp;
  return ok();
}

void DataSet::Impl::take_over(const DataSetState& now) {
  MutexLock lock(mutex);
  state = now;
  std::map<uint64_t, ShownGenerationRef> next;
  if (now.plan && now.order && source != nullptr && now.source == indexed_text &&
      source->has_fingerprint(now.plan->run().fingerprint)) {
    for (const Segment& segment : now.plan->segments()) {
      const auto known = shown.find(segment.generation);
      const bool same = known != shown.end() && known->second->source == source &&
                        known->second->cuts.segment() == segment &&
                        known->second->cuts.run() == now.plan->run();
      next[segment.generation] =
          same ? known->second
               : std::make_shared<const ShownGeneration>(
                     ShownGeneration{segment.generation, now.plan->generation(segment), source});
    }
  }
  shown = std::move(next);
}

Result<> DataSet::Impl::decide(const std::function<Result<>(DataSetState&)>& change,
                               const Commit& commit) {
  auto decided = [&]() -> Result<> {
    if (options.may_decide) {
      PTC_TRY(options.may_decide());
    }
    PTC_TRY(look_at_layout());  // of which this node may not have heard yet: what fits it must not
                                // be refused
    MutexLock lock(changes);
    PTC_TRY(const DataSetState now, record.update(change, commit));
    take_over(now);
    return ok();
  }();
  if (!decided) {
    set_refused(decided.error().message());
    return decided;
  }
  set_refused("");
  want_look();
  if (options.changed) options.changed();
  if (options.decided) options.decided();
  return ok();
}

std::optional<StepPool::Time> DataSet::Impl::follow() {
  {
    MutexLock lock(mutex);
    if (!look_wanted) return std::nullopt;
    looking = true;
    look_wanted = false;
    ++looks_begun;
  }
  const Result<> looked = look();
  if (options.changed) options.changed();
  MutexLock lock(mutex);
  looking = false;
  looks_done = looks_begun;
  changed.notify_all();
  if (looked) return std::nullopt;  // what was wanted meanwhile has woken the loop
  pending = looked.error().message();
  look_wanted = true;
  return std::chrono::steady_clock::now() + kLookAgain;
}

Result<> DataSet::Impl::look_at_layout() {
  if (options.dp_key.empty()) return ok();
  PTC_TRY(const auto entry, options.meta->get(options.dp_key));
  const std::optional<DataParallel> dp = entry ? options.dp_of(entry->value) : std::nullopt;
  MutexLock lock(mutex);
  if (dp) seen = *dp;
  return ok();
}

Result<> DataSet::Impl::look() {
  PTC_TRY(watch_metadata());
  PTC_TRY(look_at_layout());
  std::string why;
  DataSetState now;
  {
    MutexLock lock(changes);
    PTC_TRY(now, record.read());
    const Result<DataSetState> updated = record.update(
        [&](DataSetState& next) PTC_REQUIRES(changes) { return bring_up_to_date(next); });
    if (updated) now = updated.value();
    if (!updated && updated.error().code() != Code::kInvalidArgument) return updated.error();
    if (!updated) why = updated.error().message();
    take_over(now);
  }
  std::optional<std::string> to_index;
  auto into = std::make_shared<IndexProgress>();
  {
    MutexLock lock(mutex);
    pending = why;
    loaded = true;
    changed.notify_all();
    if (now.source == indexed_text && now.saved == indexed_saved) return ok();
    if (now.source != indexed_text) {  // else what is shown stays until it is looked at anew
      source = nullptr;
      shown.clear();
    }
    indexed_text = to_index = now.source;
    indexed_saved = now.saved;
    indexing = to_index.has_value();
    index_error.clear();
    read_errors.clear();
    progress = into;
  }
  end_indexing();
  return to_index ? begin_indexing(now, std::move(into)) : ok();
}

Result<> DataSet::Impl::begin_indexing(const DataSetState& now,
                                       std::shared_ptr<IndexProgress> into) {
  indexer = std::make_shared<Indexer>();
  {
    MutexLock own(indexer->mutex);
    indexer->of = this;
  }
  auto index = [self = indexer, text = *now.source, number = now.saved ? now.saved->number : 0,
                access = access_for(now.saved), into = std::move(into),
                path = options.directory + "/dataset.index"] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-index");
    auto opened = caught([&]() -> Result<SampleSourceRef> {
      PTC_TRY(SourceSpec spec, parse_source(text));
      spec.saved = number;
      return open_source(spec, path, *into, self->stop.get_token(), 0, access);
    });
    MutexLock own(self->mutex);
    self->ended = true;
    self->ended_changed.notify_all();
    if (self->of == nullptr || self->stop.stop_requested()) return;
    Impl& impl = *self->of;
    MutexLock lock(impl.mutex);
    impl.indexing = false;
    impl.source = opened ? std::move(opened).value() : nullptr;
    if (!opened) impl.index_error = opened.error().message();
    impl.look_wanted = true;
    impl.changed.notify_all();
    impl.follower.wake();
  };
  try {
    std::thread(std::move(index)).detach();
  } catch (const std::system_error& error) {
    MutexLock lock(mutex);
    indexed_text.reset();  // begun again
    return make_error(Code::kUnavailable, "no thread to index the source: {}", error.what());
  }
  return ok();
}

void DataSet::Impl::end_indexing() {
  if (indexer == nullptr) return;
  indexer->stop.request_stop();
  UniqueLock lock(indexer->mutex);
  // It ends at once, unless a file system does not answer.
  indexer->ended_changed.wait_for(indexer->mutex, kIndexingEnds,
                                  [&]() PTC_REQUIRES(indexer->mutex) { return indexer->ended; });
  indexer->of = nullptr;
  lock.unlock();
  indexer = nullptr;
}

void DataSet::Impl::end_checking(const Check* only) {
  MutexLock lock(mutex);
  if (only != nullptr && checking.get() != only) return;
  if (checking != nullptr) std::stop_source(checking->stop).request_stop();
  checking = nullptr;
}

SourceAccessRef DataSet::Impl::access_for(const std::optional<DataSetState::Saved>& saved) const {
  if (saved) return std::make_shared<const SourceAccess>(saved->by, options.data_roots);
  if (options.owner)
    return std::make_shared<const SourceAccess>(options.owner(), options.data_roots);
  return std::make_shared<const SourceAccess>();
}

Result<std::shared_ptr<const DataSet::Impl::Check>> DataSet::Impl::check_of(const SourceSpec& spec,
                                                                            const std::string& text,
                                                                            const User& by) {
  constexpr int kMostAtOnce =
      64;  // of all jobs: those that hang stay until their file system answers
  constexpr std::chrono::seconds kKnown{10};
  static std::atomic<int> running{0};
  MutexLock lock(mutex);
  if (checking != nullptr && checking->text == text && checking->by == by) {
    const bool ended =
        checking->answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    if (!ended || std::chrono::steady_clock::now() - checking->since < kKnown) return checking;
  }
  if (checking != nullptr) std::stop_source(checking->stop).request_stop();
  auto answer = std::make_shared<std::promise<Result<>>>();
  auto begun = std::make_shared<Check>();
  begun->text = text;
  begun->by = by;
  begun->answer = answer->get_future().share();
  checking = begun;
  if (running.fetch_add(1) >= kMostAtOnce) {
    --running;
    answer->set_value(ok());
    return checking;
  }
  auto check = [spec, access = access_for(DataSetState::Saved{0, by}), answer,
                token = begun->stop.get_token(), in_use = state.consumed > 0] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-source");
    answer->set_value(caught([&] { return check_source(spec, *access, token, in_use); }));
    --running;
  };
  try {
    std::thread(std::move(check)).detach();
  } catch (const std::system_error& error) {
    --running;
    checking = nullptr;
    return make_error(Code::kUnavailable, "no thread to look at the source: {}", error.what());
  }
  return checking;
}

Result<> DataSet::Impl::result_of(const Check& check, std::chrono::milliseconds wait) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point enough = check.since + kCheckingTakes;
  if (check.answer.wait_until(std::min(Clock::now() + wait, enough)) != std::future_status::ready) {
    if (Clock::now() < enough) {
      return make_error(Code::kConflict,
                        "source.json: its shards are still being looked for: save it again");
    }
    std::stop_source(check.stop).request_stop();
    return ok();
  }
  Result<> good = check.answer.get();
  return good || good.error().code() != Code::kCancelled ? good : ok();
}

DataSet::DataSet(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DataSet::~DataSet() = default;

std::unique_ptr<DataSet> DataSet::open(DataSetOptions options) {
  StepPool& pool = *options.pool;
  auto impl = std::make_unique<Impl>(std::move(options));
  impl->start(pool);
  return std::unique_ptr<DataSet>(new DataSet(std::move(impl)));
}

Result<> DataSet::loaded() const {
  MutexLock lock(impl_->mutex);
  if (impl_->changed.wait_for(impl_->mutex, kLoads,
                              [&]() PTC_REQUIRES(impl_->mutex) { return impl_->loaded; }))
    return ok();
  return make_error(Code::kUnavailable, "the metadata of the data set cannot be read: {}",
                    impl_->pending.empty() ? "no answer" : impl_->pending);
}

bool DataSet::is_loaded() const {
  MutexLock lock(impl_->mutex);
  return impl_->loaded;
}

std::optional<std::string> DataSet::source_text() const {
  MutexLock lock(impl_->mutex);
  return impl_->state.source;
}

std::optional<std::string> DataSet::order_text() const {
  MutexLock lock(impl_->mutex);
  return impl_->state.order;
}

Result<> DataSet::save_source(const std::string& text, const User& by,
                              std::chrono::milliseconds wait, const Commit& commit) {
  std::shared_ptr<const Impl::Check> check;
  auto look = [&]() -> Result<> {
    PTC_TRY(const SourceSpec spec, parse_source(text));
    PTC_TRY(check, impl_->check_of(spec, text, by));
    return impl_->result_of(*check, wait);
  };
  const Result<> good = look();
  if (!good && good.error().code() == Code::kConflict) {
    impl_->set_refused(good.error().message());
    return good;
  }
  impl_->end_checking(check.get());
  const auto change = [&](DataSetState& next) -> Result<> {
    const DataSetState::Saved saved{
        std::max(next.saved ? next.saved->number + 1 : 1, nanoseconds_now()), by};
    if (!good) return Error(good.error()).with_context("source.json");
    next.source = text;
    next.saved = saved;
    return ok();
  };
  return impl_->decide(change, commit);
}

Result<> DataSet::save_order(const std::string& text, const Commit& commit) {
  const auto change = [&](DataSetState& next) PTC_REQUIRES(impl_->changes) -> Result<> {
    const auto spec = OrderSpec::parse(text);
    if (!spec) return Error(spec.error()).with_context("order.json");
    next.order = text;
    const Result<> fits = impl_->bring_up_to_date(next);
    if (!fits)
      return Error(fits.error()).with_context("order.json: " + json_place(text, {"batch"}));
    return ok();
  };
  return impl_->decide(change, commit);
}

Result<> DataSet::decide_beside(std::string_view file, const std::string& text,
                                const Commit& commit) const {
  PTC_TRY(impl_->record.update(
      [&](DataSetState& state) -> Result<> {
        const Result<uint64_t> count = parse_consumed(text);
        if (file == "source.json"  ? state.source == text
            : file == "order.json" ? state.order == text
                                   : count && count.value() == state.consumed)
          return ok();
        return make_error(Code::kConflict, "{} is another by now", file);
      },
      commit));
  return ok();
}

Result<> DataSet::remove_source() {
  impl_->end_checking();
  return impl_->decide([](DataSetState& next) -> Result<> {
    if (next.consumed > 0) {
      return invalid_argument("source.json: {} of its samples are consumed", next.consumed);
    }
    next.source.reset();
    next.saved.reset();
    return ok();
  });
}

Result<> DataSet::remove_order() {
  return impl_->decide([](DataSetState& next) -> Result<> {
    if (next.consumed > 0) {
      return invalid_argument("order.json: {} samples are consumed in this order", next.consumed);
    }
    next.order.reset();
    return ok();
  });
}

Result<> DataSet::remove() {
  impl_->end_checking();
  return impl_->decide([](DataSetState& next) -> Result<> {
    next = {};
    return ok();
  });
}

std::string DataSet::consumed_text() const {
  MutexLock lock(impl_->mutex);
  return fmt::format("{}\n", impl_->state.consumed);
}

Result<> DataSet::save_consumed(std::string_view text, const Commit& commit) {
  const auto change = [&](DataSetState& next) -> Result<> {
    PTC_TRY(const uint64_t count, parse_consumed(text));
    if (count == next.consumed) return ok();
    if (!next.plan)
      return invalid_argument("consumed: there is no run yet: nothing can be consumed");
    if (count > next.plan->end()) {
      return invalid_argument(
          "consumed: {} is more than the {} samples of the whole run ({} epoch{} of {})", count,
          next.plan->end(), next.plan->last().epochs, next.plan->last().epochs == 1 ? "" : "s",
          next.plan->run().samples);
    }
    if (count > next.consumed) {
      next.consumed = count;
      return ok();
    }
    if (!impl_->options.checkpoint_has || !impl_->options.checkpoint_has(count)) {
      return invalid_argument(
          "consumed: {} is less than the {} that are consumed. The run goes back only together "
          "with a checkpoint "
          "that was committed with this count in a file `consumed`",
          count, next.consumed);
    }
    DataParallel dp;
    {
      MutexLock lock(impl_->mutex);
      dp = next.dp_now(impl_->seen);
    }
    const std::optional<OrderSpec> order = next.order_spec();
    if (!order) return invalid_argument("consumed: there is no order.json");
    auto back = next.plan->roll_back(*order, dp.ranks, count);
    if (!back) return Error(back.error()).with_context("consumed");
    next.plan = std::move(back.value().plan);
    next.consumed = back.value().consumed;
    next.dp = dp;
    return ok();
  };
  return impl_->decide(change, commit);
}

void DataSet::set_dp(DataParallel dp) {
  MutexLock lock(impl_->mutex);
  if (impl_->seen == dp) return;
  impl_->seen = dp;
  impl_->look_wanted = true;
  impl_->follower.wake();
}

Result<> DataSet::check_dp(uint64_t ranks) const {
  PTC_TRY(const DataSetState now, impl_->record.read());
  const std::optional<OrderSpec> order = now.order_spec();
  if (!order) return ok();
  const auto fits = now.plan ? [&]() -> Result<> {
    PTC_TRY(now.plan->change(*order, ranks, now.consumed));
    return ok();
  }()
      : order->check(ranks, std::nullopt);
  if (!fits) return Error(fits.error()).with_context("the data set");
  return ok();
}

void DataSet::catch_up() {
  MutexLock lock(impl_->mutex);
  impl_->look_wanted = true;
  impl_->follower.wake();
  const uint64_t next =
      impl_->looks_begun + 1;  // the one under way may have read before it was decided
  impl_->changed.wait_for(impl_->mutex, kCatchesUp,
                          [&]() PTC_REQUIRES(impl_->mutex) { return impl_->looks_done >= next; });
}

std::vector<uint64_t> DataSet::generations() const {
  MutexLock lock(impl_->mutex);
  std::vector<uint64_t> numbers;
  for (const auto& [number, generation] : impl_->shown) numbers.push_back(number);
  return numbers;
}

ShownGenerationRef DataSet::generation(uint64_t number) const {
  MutexLock lock(impl_->mutex);
  const auto found = impl_->shown.find(number);
  return found == impl_->shown.end() ? nullptr : found->second;
}

void DataSet::conceal_refused(std::string_view file, const std::string& why) {
  MutexLock lock(impl_->mutex);
  if (impl_->refused.starts_with(file)) impl_->refused = why;
}

void DataSet::note_read_error(const Error& error) {
  MutexLock lock(impl_->mutex);
  std::deque<Impl::ReadError>& errors = impl_->read_errors;
  std::erase_if(errors, [&](const auto& known) { return known.what == error.message(); });
  if (errors.size() == kMostReadErrors) errors.pop_front();
  errors.push_back({error.message(), std::chrono::steady_clock::now()});
}

void DataSet::wait_shown(std::chrono::milliseconds most) const {
  MutexLock lock(impl_->mutex);
  impl_->changed.wait_for(impl_->mutex, most, [&]() PTC_REQUIRES(impl_->mutex) {
    return impl_->loaded && !impl_->look_wanted && !impl_->looking && !impl_->indexing;
  });
}

void DataSet::wait_settled() const {
  MutexLock lock(impl_->mutex);
  impl_->changed.wait(impl_->mutex, [&]() PTC_REQUIRES(impl_->mutex) {
    return !impl_->look_wanted && !impl_->looking && !impl_->indexing;
  });
}

}  // namespace ptc
