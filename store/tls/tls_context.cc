#include "store/tls/tls_context.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include "store/base/file.h"
#include "store/tls/private_file.h"

namespace ptc {
namespace {

constexpr size_t kMaxKeyBytes = 64 << 10, kMaxCertificatesBytes = 16 << 20;

/// A key file with a passphrase is refused, not asked for at a terminal.
int no_passphrase(char*, int, int, void*) { return 0; }

Result<> use_key(SSL_CTX* context, const std::string& path) {
  PTC_TRY(auto text, read_private_file(path, kMaxKeyBytes));
  std::unique_ptr<BIO, int (*)(BIO*)> bio(
      ::BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &::BIO_free);
  std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(
      ::PEM_read_bio_PrivateKey(bio.get(), nullptr, no_passphrase, nullptr), &::EVP_PKEY_free);
  ::OPENSSL_cleanse(text.data(), text.size());
  if (!key)
    return invalid_argument("{} holds no private key in PEM without a passphrase: {}", path,
                            last_tls_error());
  if (::SSL_CTX_use_PrivateKey(context, key.get()) != 1)
    return invalid_argument("the key {} is not that of the certificate: {}", path,
                            last_tls_error());
  return ok();
}

/// OpenSSL does not say why it could not read a file.
Result<> check_readable(const std::string& path, std::string_view what) {
  auto text = read_text_file(AT_FDCWD, path, kMaxCertificatesBytes);
  if (text) return ok();
  return invalid_argument("{} cannot be read; give a file in PEM: {}", what,
                          text.error().message());
}

}  // namespace

std::string last_tls_error() {
  const char* reason = ::ERR_reason_error_string(::ERR_peek_error());
  ::ERR_clear_error();
  return reason == nullptr ? "unknown error" : reason;
}

Result<std::shared_ptr<const TlsContext>> TlsContext::load(const TlsFiles& files, TlsUse use) {
  if (use == TlsUse::kMutual &&
      (files.ca.empty() || files.certificate.empty() || files.key.empty()))
    return invalid_argument(
        "TLS between nodes wants three files: the authority, the certificate and its key");
  if (files.certificate.empty() != files.key.empty())
    return invalid_argument("a TLS certificate and its key are given together or not at all");
  auto result = std::make_shared<TlsContext>();
  result->context_ = std::shared_ptr<SSL_CTX>(::SSL_CTX_new(::TLS_method()), &::SSL_CTX_free);
  SSL_CTX* context = result->context_.get();
  PTC_CHECK(context != nullptr);
  ::SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  const int both = use == TlsUse::kMutual ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0;
  ::SSL_CTX_set_verify(context, SSL_VERIFY_PEER | both, nullptr);
  ::SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // Nothing is resumed; a ticket would make an idle connection look as if something had come.
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_num_tickets(context, 0);
  if (files.ca.empty()) {
    ::SSL_CTX_set_default_verify_paths(context);
  } else {
    PTC_TRY(check_readable(files.ca, "the authority's certificates"));
    if (::SSL_CTX_load_verify_file(context, files.ca.c_str()) != 1)
      return invalid_argument("{} holds no certificates in PEM: {}", files.ca, last_tls_error());
  }
  if (files.certificate.empty()) return std::shared_ptr<const TlsContext>(std::move(result));
  PTC_TRY(check_readable(files.certificate, "the certificate"));
  if (::SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1)
    return invalid_argument("{} holds no certificate in PEM: {}", files.certificate,
                            last_tls_error());
  PTC_TRY(use_key(context, files.key));
  return std::shared_ptr<const TlsContext>(std::move(result));
}

Result<std::shared_ptr<const TlsSource>> TlsSource::open(TlsFiles files, TlsUse use) {
  auto source = std::make_shared<TlsSource>();
  const std::vector<std::string> paths{files.ca, files.certificate, files.key};
  auto load = [files = std::move(files), use] { return TlsContext::load(files, use); };
  PTC_TRY(source->files_, FollowedFiles<TlsContext>::open(paths, "certificates", std::move(load)));
  return std::shared_ptr<const TlsSource>(std::move(source));
}

}  // namespace ptc
