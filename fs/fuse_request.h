// One request of the kernel: answered exactly once, whatever happens.
#pragma once

#define FUSE_USE_VERSION 314
#include <fuse3/fuse_lowlevel.h>

#include <spdlog/spdlog.h>

#include <cerrno>
#include <exception>
#include <new>
#include <utility>

#include "fs/fuse_session.h"
#include "fs/node.h"
#include "fs/stats.h"
#include "fs/tree.h"

namespace ptc {

inline Tree& tree_of(fuse_req_t raw) {
  return static_cast<FuseSession*>(fuse_req_userdata(raw))->tree();
}

/// Replies on the thread that made it. Destroyed without a reply: EIO.
class FuseRequest {
 public:
  explicit FuseRequest(fuse_req_t raw) : raw_(raw) {}
  ~FuseRequest() {
    if (!done_) error(EIO);
  }
  FuseRequest(const FuseRequest&) = delete;
  FuseRequest& operator=(const FuseRequest&) = delete;

  fuse_req_t raw() const { return raw_; }
  bool done() const { return done_; }
  Tree& tree() const { return tree_of(raw_); }
  Caller caller() const {
    const fuse_ctx* context = fuse_req_ctx(raw_);
    return {context->uid, context->gid, context->pid};
  }

  /// Replies through `reply(raw)`. A reply that could not be delivered is the kernel's loss, except
  /// for what was counted on its behalf: false tells the caller to take that back.
  template <class Reply>
  bool reply(Reply send) {
    done_ = true;
    return send(raw_) == 0;
  }
  void error(int value) {
    reply([&](fuse_req_t raw) { return fuse_reply_err(raw, value); });
  }
  void done_ok() { error(0); }

  /// The name of a node: counted before the reply, because the reply may be the kernel's last use.
  void entry(const NodeRef& node);

 private:
  const fuse_req_t raw_;
  bool done_ = false;
};

/// Node of a node id. The kernel holds a reference to it during the request.
Node& node_of(fuse_req_t raw, fuse_ino_t inode);
fuse_ino_t id_of(const Node& node);

/// Attributes, inode id and times to live of a node; counts nothing.
FsResult<fuse_entry_param> entry_of(Tree& tree, Node& node);

/// Runs one operation: counts it, lists it as in flight, turns errors and exceptions into a reply.
template <class Body>
void serve(fuse_req_t raw, Op op, fuse_ino_t inode, Body body) noexcept {
  FuseRequest request(raw);
  InFlight in_flight(request.tree().stats(), op, inode,
                     static_cast<uint32_t>(fuse_req_ctx(raw)->pid));
  int failed = EIO;
  try {
    FsResult<> result = body(request);
    if (result) return;
    failed = result.error().value;
  } catch (const std::bad_alloc&) {
    failed = ENOMEM;
  } catch (const std::exception& error) {
    spdlog::error("{} failed: {}", op_name(op), error.what());
  } catch (...) {
    spdlog::error("{} failed", op_name(op));
  }
  in_flight.failed();
  if (!request.done()) request.error(failed);
}

/// Every operation, for fuse_session_new().
const fuse_lowlevel_ops& fuse_operations();

/// What the reply of open or create on this thread is to carry: a backing id, or 0. The session puts
/// it into the bytes of the reply, where this libfuse has no field for it.
int32_t& reply_backing_id();

}  // namespace ptc
