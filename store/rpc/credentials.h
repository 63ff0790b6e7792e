// How nodes prove to each other that they are of one cluster: a shared secret, certificates, or
// both.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "store/base/error.h"
#include "store/rpc/shared_secret.h"
#include "store/tls/followed_files.h"
#include "store/tls/tls_context.h"

namespace ptc {

/// What a user gave. All empty: no authentication, which a listener takes on loopback only.
struct PeerAuth {
  std::string secret_file;  // shared_secret.h
  std::string ca_file, cert_file,
      key_file;           // TLS: PEM, all three; the certificate names its node (SAN)
  bool insecure = false;  // listen anywhere without authentication
};

/// Threads: any.
class Credentials {
 public:
  /// Reads the files. kInvalidArgument, with what to do, of one that is missing, too short, or that
  /// others than its owner may read.
  static Result<std::shared_ptr<const Credentials>> load(const PeerAuth& auth);

  bool authenticates() const { return secret_ != nullptr || has_tls(); }
  bool has_tls() const { return tls_ != nullptr; }
  /// For a new connection: of the files as they are now, so that certificates can be exchanged
  /// while nodes run; of the last good ones if these cannot be used. Nothing without TLS.
  std::shared_ptr<const TlsContext> tls() const { return has_tls() ? tls_->context() : nullptr; }
  /// That this node knows the shared secret, as it is now in its file, or was when that was good:
  /// an HMAC of the text; without a secret empty.
  std::string proof(std::string_view text) const {
    return secret_ ? secret_->value()->proof(text) : std::string();
  }
  /// "", or why another's proof of the text is none.
  std::string_view fault(std::string_view proof, std::string_view text) const;

 private:
  std::shared_ptr<const FollowedFiles<SharedSecret>> secret_;
  std::shared_ptr<const TlsSource> tls_;
};

}  // namespace ptc
