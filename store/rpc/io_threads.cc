#include "store/rpc/io_threads.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/strand.hpp>

namespace ptc {

struct IoThreads::Impl {
  asio::io_context context;
  asio::executor_work_guard<asio::io_context::executor_type> work{context.get_executor()};
  std::vector<std::thread> threads;
};

IoThreads::IoThreads(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::shared_ptr<IoThreads>> IoThreads::start() try {
  std::shared_ptr<IoThreads> io(new IoThreads(std::make_unique<Impl>()));
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 2u, 8u);
  for (unsigned i = 0; i < count; ++i) {
    io->impl_->threads.emplace_back([&context = io->impl_->context] {
      ::pthread_setname_np(::pthread_self(), "ptcfs-net");
      context.run();
    });
  }
  return io;
} catch (const std::exception& error) {
  return make_error(Code::kUnavailable, "threads for the network: {}", error.what());
}

IoThreads::~IoThreads() {
  impl_->work.reset();
  impl_->context.stop();
  for (std::thread& thread : impl_->threads) thread.join();
}

IoExecutor IoThreads::new_strand() { return asio::make_strand(impl_->context); }

}  // namespace ptc
