// How nodes prove to each other that they are of one cluster: a shared secret, certificates, or both.
#pragma once

#include <memory>
#include <string>

#include "store/base/error.h"

namespace ptc {

/// What a user gave. All empty: no authentication, which a listener takes on loopback only.
struct PeerAuth {
  std::string secret_file;  // 32 to 4096 bytes that all nodes share; white space at its end does not count
  bool insecure = false;    // listen anywhere without authentication
};

/// Threads: any.
class Credentials {
 public:
  /// Reads the files. kInvalidArgument, with what to do, of one that is missing, too short, or that
  /// others than its owner may read.
  static Result<std::shared_ptr<const Credentials>> load(const PeerAuth& auth);

  bool authenticates() const { return !secret_.empty(); }
  bool insecure() const { return insecure_; }
  bool has_secret() const { return !secret_.empty(); }
  /// HMAC-SHA256 of the text under the shared secret, 32 bytes; without a secret empty.
  std::string proof(std::string_view text) const;

 private:
  std::string secret_;
  bool insecure_ = false;
};

}  // namespace ptc
