// How nodes prove to each other that they are of one cluster: a shared secret, certificates, or both.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "store/base/error.h"
#include "store/tls/tls_context.h"

namespace ptc {

/// What a user gave. All empty: no authentication, which a listener takes on loopback only.
struct PeerAuth {
  std::string secret_file;  // 32 to 4096 bytes that all nodes share; white space at its end does not count
  std::string ca_file, cert_file, key_file;  // TLS: PEM, all three; the certificate names its node (SAN)
  bool insecure = false;    // listen anywhere without authentication
};

/// Threads: any.
class Credentials {
 public:
  /// Reads the files. kInvalidArgument, with what to do, of one that is missing, too short, or that
  /// others than its owner may read.
  static Result<std::shared_ptr<const Credentials>> load(const PeerAuth& auth);

  bool authenticates() const { return !secret_.empty() || has_tls(); }
  bool has_tls() const { return tls_ != nullptr; }
  /// For a new connection: of the files as they are now, so that certificates can be exchanged while nodes
  /// run; of the last good ones if these cannot be used. Nothing without TLS.
  std::shared_ptr<const TlsContext> tls() const { return has_tls() ? tls_->context() : nullptr; }
  /// HMAC-SHA256 of the text under the shared secret, 32 bytes; without a secret empty.
  std::string proof(std::string_view text) const;

 private:
  std::string secret_;
  std::shared_ptr<const TlsSource> tls_;
};

}  // namespace ptc
