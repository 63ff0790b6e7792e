// One request of the kernel: answered exactly once, whatever happens.
#pragma once

#define FUSE_USE_VERSION 314
#include <fuse3/fuse_lowlevel.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "fs/kernel/fuse_session.h"
#include "fs/kernel/waits.h"
#include "fs/tree/node.h"
#include "fs/tree/stats.h"
#include "fs/tree/tree.h"

namespace ptc {

inline FuseSession& session_of(fuse_req_t raw) {
  return *static_cast<FuseSession*>(fuse_req_userdata(raw));
}
inline Tree& tree_of(fuse_req_t raw) { return session_of(raw).tree(); }
/// Node of a node id; null: the kernel has no such node, or should not have.
inline NodeRef node_of(fuse_req_t raw, fuse_ino_t id) { return tree_of(raw).table().at(id); }
inline Caller caller_of(fuse_req_t raw) {
  const fuse_ctx* context = fuse_req_ctx(raw);
  return {context->uid, context->gid, context->pid};
}

/// Replies on the thread that made it. Destroyed without a reply: EIO. One that may wait
/// (`waiting`) can have been replied to by another: then its own replies go nowhere, and `raw` is
/// not to be used.
class FuseRequest {
 public:
  explicit FuseRequest(fuse_req_t raw) : FuseRequest(raw, tree_of(raw), caller_of(raw), nullptr) {}
  FuseRequest(fuse_req_t raw, Tree& tree, const Caller& caller, WaitingRequest* waiting)
      : raw_(raw), waiting_(waiting), tree_(tree), caller_(caller) {}
  ~FuseRequest() {
    if (!done_) error(EIO);
  }
  FuseRequest(const FuseRequest&) = delete;
  FuseRequest& operator=(const FuseRequest&) = delete;

  fuse_req_t raw() const { return raw_; }
  bool done() const { return done_; }
  Tree& tree() const { return tree_; }
  const Caller& caller() const { return caller_; }
  bool interrupted() const {
    return waiting_ != nullptr ? waiting_->interrupted() : fuse_req_interrupted(raw_) != 0;
  }

  /// Replies through `reply(raw)`. A reply that could not be delivered is the kernel's loss, except
  /// for what was counted on its behalf: false tells the caller to take that back.
  template <class Reply>
  bool reply(Reply send) {
    done_ = true;
    if (waiting_ == nullptr) return send(raw_) == 0;
    if (!waiting_->claim()) return false;
    const bool delivered = send(raw_) == 0;
    waiting_->ended(failed_);
    return delivered;
  }
  void failed(int value) {
    failed_ = true;
    error(value);
  }
  void error(int value) {
    reply([&](fuse_req_t raw) { return fuse_reply_err(raw, value); });
  }
  void done_ok() { error(0); }

  /// `node` is called `name` in `parent`: counted before the reply, because the reply may be the
  /// kernel's last use.
  void entry(const NodeRef& node, const Node& parent, const std::string& name);

 private:
  const fuse_req_t raw_;
  WaitingRequest* const waiting_;
  Tree& tree_;
  const Caller caller_;
  bool done_ = false, failed_ = false;
};

/// Attributes and times to live of a node; its id is of NodeTable::remember().
FsResult<fuse_entry_param> entry_of(Tree& tree, Node& node);

/// Runs one operation; its errors and exceptions become an errno. 0: it has replied.
template <class Body>
int run(FuseRequest& request, Op op, Body& body) noexcept {
  try {
    FsResult<> result = body(request);
    return result ? 0 : result.error().value;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::exception& error) {
    spdlog::error("{} failed: {}", op_name(op), error.what());
  } catch (...) {
    spdlog::error("{} failed", op_name(op));
  }
  return EIO;
}

/// Runs one operation: counts it, lists it as in flight, replies with its error.
template <class Body>
void serve(fuse_req_t raw, Op op, fuse_ino_t inode, Body body) noexcept {
  FuseRequest request(raw);
  InFlight in_flight(request.tree().stats(), op, inode,
                     static_cast<uint32_t>(request.caller().pid));
  const int failed = run(request, op, body);
  if (failed == 0) return;
  in_flight.failed();
  if (!request.done()) request.error(failed);
}

/// The same for one that may wait for somebody; null: for nobody. `body` outlives the callback, and
/// may outlive what the kernel knows: it holds what it uses, and `awaited`.
template <class Body>
void serve(fuse_req_t raw, Op op, fuse_ino_t inode, const Awaited* awaited, Body body) noexcept {
  if (awaited == nullptr) return serve(raw, op, inode, std::move(body));
  auto answer = [op, body = std::move(body)](FuseRequest& request) mutable {
    const int failed = run(request, op, body);
    if (failed != 0 && !request.done()) request.failed(failed);
  };
  FuseSession& session = session_of(raw);
  session.waits().run(std::make_shared<WaitingRequest>(raw, session.tree(), caller_of(raw), op,
                                                       inode, *awaited, std::move(answer)));
}

/// Answers with an error.
inline void refuse(fuse_req_t raw, Op op, fuse_ino_t inode, int error) noexcept {
  serve(raw, op, inode, [error](FuseRequest&) -> FsResult<> { return Errno{error}; });
}

/// Whom operations wait for.
inline const Awaited* nobody(const Node&) { return nullptr; }
inline const Awaited* nobody(const Handle&) { return nullptr; }
inline const Awaited* awaited_by_reading(const Node& node) { return node.awaited(); }
inline const Awaited* awaited_by_open(const Node& node) { return node.awaited_by_open(); }
inline const Awaited* awaited_by_reading(const Handle& handle) { return handle.awaited(); }

/// An operation on a node, which it holds: ESTALE where `id` stands for none. `awaits`: whom it may
/// have to wait for.
template <class Body>
void serve_node(fuse_req_t raw, Op op, fuse_ino_t id, const Awaited* (*awaits)(const Node&),
                Body body) noexcept {
  NodeRef node = node_of(raw, id);
  if (node == nullptr) return refuse(raw, op, id, ESTALE);
  const Awaited* awaited = awaits(*node);
  auto of_node = [node = std::move(node), body = std::move(body)](FuseRequest& request) mutable {
    return body(request, *node);
  };
  serve(raw, op, id, awaited, std::move(of_node));
}

/// An operation on an open file, which it holds: EBADF where `info` has a number of none.
template <class Body>
void serve_file(fuse_req_t raw, Op op, fuse_ino_t id, const fuse_file_info* info,
                const Awaited* (*awaits)(const Handle&), Body body) noexcept {
  std::shared_ptr<Handle> file = session_of(raw).open_files().at(info->fh);
  if (file == nullptr) return refuse(raw, op, id, EBADF);
  const Awaited* awaited = awaits(*file);
  auto of_file = [file = std::move(file), body = std::move(body)](FuseRequest& request) mutable {
    return body(request, *file);
  };
  serve(raw, op, id, awaited, std::move(of_file));
}

/// Every operation, for fuse_session_new().
const fuse_lowlevel_ops& fuse_operations();

/// The number of the request that this thread has received last, with the highest bit set where the
/// kernel gives it out once more.
uint64_t& served_request();
inline constexpr uint64_t kResentBit = uint64_t{1} << 63;

/// What the reply of open or create on this thread is to carry: a backing id, or 0. The session
/// puts it into the bytes of the reply, where this libfuse has no field for it.
int32_t& reply_backing_id();

}  // namespace ptc
