// Certificates and keys in files: what TLS needs of them, read again when they change.
#pragma once

#include <memory>
#include <string>

#include "store/base/error.h"
#include "store/tls/followed_files.h"

struct ssl_ctx_st;

namespace ptc {

/// PEM files: the authority to believe, this side's certificate (with the chain to its authority),
/// and its key, which nobody else may read.
struct TlsFiles {
  std::string ca, certificate, key;
};

enum class TlsUse {
  kMutual,  // either side of a connection between equals: all three files; both show certificates
  kClient,  // of a server: without `ca` the system's authorities; a certificate only where one is
            // given
};

/// TLS 1.2 or later. Nothing changes it: connections share it. Threads: any.
class TlsContext {
 public:
  /// kInvalidArgument, with what to do.
  static Result<std::shared_ptr<const TlsContext>> load(const TlsFiles& files, TlsUse use);
  ssl_ctx_st* get() const { return context_.get(); }

 private:
  std::shared_ptr<ssl_ctx_st> context_;
};

/// The files, followed: certificates can be exchanged while connections are made. Threads: any.
class TlsSource {
 public:
  static Result<std::shared_ptr<const TlsSource>> open(TlsFiles files, TlsUse use);
  /// For a new connection: of the files as they are now; of the last good ones while these cannot
  /// be used, which is logged once.
  std::shared_ptr<const TlsContext> context() const { return files_->value(); }

 private:
  std::shared_ptr<const FollowedFiles<TlsContext>> files_;
};

/// What OpenSSL says of the last failure of this thread, which is forgotten.
std::string last_tls_error();

}  // namespace ptc
