#include "reshard/job/hash_queue.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>

#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr size_t kMostWaiting = 1 << 16;  // more are hashed at the commit
constexpr auto kLongestPause = std::chrono::milliseconds(512);

}  // namespace

void HashQueue::start(StepPool& pool) {
  loop_.start(pool, [this](const std::stop_token& stop) { return hash_next(stop); });
}

void HashQueue::stop() { loop_.stop(); }

void HashQueue::closed(const std::string& path) {
  MutexLock lock(mutex_);
  if (waiting_.size() >= kMostWaiting) return;
  waiting_.push_back({path});
  loop_.wake();
}

void HashQueue::leave(const std::string& incoming) {
  MutexLock lock(mutex_);
  const auto is_of_it = [&](const Waiting& one) { return one.path.starts_with(incoming + "/"); };
  std::erase_if(waiting_, is_of_it);
  std::erase_if(again_, [&](const auto& one) { return is_of_it(one.second); });
  if (hashing_ == incoming) stop_hashing_.request_stop();
}

std::optional<HashQueue::Waiting> HashQueue::take_next() {
  std::optional<Waiting> next;
  if (!again_.empty() && again_.begin()->first <= std::chrono::steady_clock::now()) {
    next = std::move(again_.begin()->second);
    again_.erase(again_.begin());
  } else if (!waiting_.empty()) {
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  return next;
}

std::optional<StepPool::Time> HashQueue::hash_next(const std::stop_token& stop) {
  Waiting one;
  std::stop_source stop_one;
  {
    MutexLock lock(mutex_);
    std::optional<Waiting> next = take_next();
    if (!next && again_.empty()) return std::nullopt;
    if (!next) return again_.begin()->first;
    one = *std::move(next);
    hashing_ = one.path.substr(0, one.path.find('/'));
    stop_hashing_ = std::stop_source();
    stop_one = stop_hashing_;
  }
  std::stop_callback stop_with_job(stop, [&] { stop_one.request_stop(); });
  try {
    if (!hash(one.path, expected_(), stop_one.get_token())) ask_again(one, stop_one);
  } catch (const std::exception& error) {  // no memory: the commit will hash it, or say so
    spdlog::warn("job {}: hashing {}: {}", job_, one.path, error.what());
  }
  MutexLock lock(mutex_);
  hashing_.clear();
  return std::chrono::steady_clock::now();  // after those of other jobs
}

void HashQueue::ask_again(Waiting one, const std::stop_source& stop) {
  MutexLock lock(mutex_);
  if (one.pause > kLongestPause || again_.size() >= kMostWaiting || stop.stop_requested()) return;
  const auto due = std::chrono::steady_clock::now() + one.pause;
  one.pause *= 2;
  again_.emplace(due, std::move(one));
}

bool HashQueue::hash(const std::string& path, Expected expected, std::stop_token stop) {
  size_t name_end = path.find('/');
  if (name_end == std::string::npos || path.compare(name_end, 6, "/rank/") != 0) return true;
  size_t rank_begin = name_end + 6, rank_end = path.find('/', rank_begin);
  if (rank_end == std::string::npos) return true;
  errno = 0;
  char* end = nullptr;
  uint64_t rank = std::strtoull(path.c_str() + rank_begin, &end, 10);
  if (errno != 0 || end != path.c_str() + rank_end) return true;
  const std::string root = incoming_dir_ + "/" + path.substr(0, name_end);
  Result<UniqueFd> root_fd = open_file(AT_FDCWD, root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (root_fd.has_error()) return true;
  struct stat st {};
  if (fstatat(root_fd.value().get(), "layout.json", &st, 0) == 0) {
    Result<std::string> text =
        read_text_file(root_fd.value().get(), "layout.json", 1 << 20, FileKind::kOwn);
    if (text.has_error()) return true;
    Result<Layout> own = Layout::parse(text.value());
    if (own.has_error()) return true;
    expected.spec = own.value().spec;
  }
  std::shared_ptr<const Model> known;
  if (expected.previous != nullptr) {
    if (auto model = expected.previous->model_under(expected.spec); model.has_value())
      known = std::move(model).value();
  }
  return hash_closed_file(root_fd.value().get(), path.substr(rank_end + 1), rank, expected.spec,
                          known.get(), hashes_, std::move(stop));
}

}  // namespace ptc
