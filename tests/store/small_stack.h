// For what must not take more stack the deeper something is nested.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstddef>
#include <functional>

namespace ptc {

/// Runs `work` in a thread with 512 KiB of stack. A level of directories that takes some of it, and
/// a descriptor, is told by kNested of them.
inline constexpr int kNested = 4'000;
inline void on_small_stack(std::function<void()> work) {
  pthread_attr_t attributes;
  ASSERT_EQ(::pthread_attr_init(&attributes), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&attributes, size_t{512} << 10), 0);
  pthread_t thread = {};
  const auto run = [](void* what) -> void* {
    (*static_cast<std::function<void()>*>(what))();
    return nullptr;
  };
  ASSERT_EQ(::pthread_create(&thread, &attributes, run, &work), 0);
  ::pthread_join(thread, nullptr);
  ::pthread_attr_destroy(&attributes);
}

}  // namespace ptc
