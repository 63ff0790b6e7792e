#include "store/net/io_threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace ptc {

struct IoThreads::Impl {
  struct Loop {
    asio::io_context context{1};
    asio::executor_work_guard<asio::io_context::executor_type> work{context.get_executor()};
    std::thread thread;
  };
  std::vector<std::unique_ptr<Loop>> loops;
  std::atomic<size_t> turn{0};

  ~Impl() {
    for (auto& loop : loops) loop->context.stop();
    for (auto& loop : loops)
      if (loop->thread.joinable()) loop->thread.join();
  }
};

IoThreads::IoThreads(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
IoThreads::~IoThreads() = default;

Result<std::shared_ptr<IoThreads>> IoThreads::start() {
  return start(std::clamp(std::thread::hardware_concurrency(), 2u, 4u));
}

Result<std::shared_ptr<IoThreads>> IoThreads::start(unsigned count, const char* name) try {
  auto impl = std::make_unique<Impl>();
  for (unsigned i = 0; i < count; ++i) {
    Impl::Loop& loop = *impl->loops.emplace_back(std::make_unique<Impl::Loop>());
    loop.thread = std::thread([&context = loop.context, name = std::string(name)] {
      ::pthread_setname_np(::pthread_self(), name.c_str());
      context.run();
    });
  }
  return std::shared_ptr<IoThreads>(new IoThreads(std::move(impl)));
} catch (const std::exception& error) {
  return make_error(Code::kUnavailable, "threads for the network: {}", error.what());
}

IoExecutor IoThreads::next() {
  return impl_->loops[impl_->turn++ % impl_->loops.size()]->context.get_executor();
}

}  // namespace ptc
