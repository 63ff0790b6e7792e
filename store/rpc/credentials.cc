#include "store/rpc/credentials.h"

namespace ptc {
namespace {

Result<std::shared_ptr<const SharedSecret>> read_secret(const std::string& path) {
  PTC_TRY(auto secret, SharedSecret::read(path));
  return std::make_shared<const SharedSecret>(std::move(secret));
}

}  // namespace

Result<std::shared_ptr<const Credentials>> Credentials::load(const PeerAuth& auth) {
  auto credentials = std::make_shared<Credentials>();
  if (!auth.secret_file.empty()) {
    auto read = [path = auth.secret_file] { return read_secret(path); };
    PTC_TRY(credentials->secret_,
            FollowedFiles<SharedSecret>::open({auth.secret_file}, "secrets", std::move(read)));
  }
  if (!auth.ca_file.empty() || !auth.cert_file.empty() || !auth.key_file.empty()) {
    PTC_TRY(credentials->tls_,
            TlsSource::open({auth.ca_file, auth.cert_file, auth.key_file}, TlsUse::kMutual));
  }
  return std::shared_ptr<const Credentials>(std::move(credentials));
}

std::string_view Credentials::fault(std::string_view proof, std::string_view text) const {
  if (!secret_) return proof.empty() ? "" : "it has a shared secret and the other side has none";
  if (proof.empty()) return "it has no shared secret and the other side has one";
  return secret_->value()->proves(proof, text) ? "" : "its shared secret is another";
}

}  // namespace ptc
