// Coroutines that share a thread: how one with much to do leaves it to the others.
#pragma once

#include <functional>

#include "store/base/spare_threads.h"
#include "store/net/task.h"

namespace ptc {

/// What else is ready on the coroutine's executor goes first. For a loop that may never have to
/// wait for its peer, as where that is the faster one: the thread would be the loop's alone.
asio::awaitable<void> let_others_go_first();

/// Work that waits for something else than the network is done by one of `threads`. Errors:
/// kUnavailable: there is none; it was not done. `work` throws nothing.
Task<> do_elsewhere(SpareThreads& threads, std::function<void()> work);

}  // namespace ptc
