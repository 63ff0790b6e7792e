// Reads certificates, of files and of servers, for `ptc doctor`.
#include <fcntl.h>
#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/socket.h>
#include <time.h>

#include <memory>

#include "store/base/file.h"
#include "store/meta/etcd_http.h"
#include "tools/ptc/doctor_gather.h"

namespace ptc::cli {
namespace {

constexpr size_t kMaxCertificateBytes = 16 << 20;
constexpr timeval kServerPatience{2, 0};

int64_t seconds_of(const ASN1_TIME* time) {
  tm parts = {};
  return time != nullptr && ::ASN1_TIME_to_tm(time, &parts) == 1 ? ::timegm(&parts) : 0;
}

void add_certificate(const X509* certificate, CertificateFacts* facts) {
  facts->spans.push_back({seconds_of(::X509_get0_notBefore(certificate)),
                          seconds_of(::X509_get0_notAfter(certificate))});
}

/// The daemon's own path may lead elsewhere, in a container.
Result<std::string> text_of(const std::string& path, uint64_t pid) {
  auto text = read_text_file(AT_FDCWD, path, kMaxCertificateBytes);
  if (text || pid == 0 || text.error().code() != Code::kNotFound) return text;
  const std::string process = fmt::format("/proc/{}", pid);
  const auto name = read_text_file(AT_FDCWD, process + "/comm", 64);
  if (!name || !name.value().starts_with("ptcfs")) return text;
  return read_text_file(AT_FDCWD, process + "/root" + path, kMaxCertificateBytes);
}

/// With deadlines; -1: it cannot be reached.
int connect_to_server(const HttpEndpoint& endpoint) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found) != 0) return -1;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, &::freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    UniqueFd fd(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
    if (fd.get() < 0) continue;
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})  // the second also of connect
      ::setsockopt(fd.get(), SOL_SOCKET, option, &kServerPatience, sizeof kServerPatience);
    if (::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0) return fd.release();
  }
  return -1;
}

}  // namespace

CertificateFacts read_certificates(std::string option, const std::string& path, bool is_authority,
                                   uint64_t pid) {
  CertificateFacts facts{.option = std::move(option), .path = path, .is_authority = is_authority};
  const auto text = text_of(path, pid);
  if (text.has_error()) {
    facts.trouble = text.error().message();
    return facts;
  }
  const std::unique_ptr<BIO, int (*)(BIO*)> bio(
      ::BIO_new_mem_buf(text.value().data(), static_cast<int>(text.value().size())), &::BIO_free);
  for (;;) {
    const std::unique_ptr<X509, void (*)(X509*)> certificate(
        ::PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &::X509_free);
    if (!certificate) break;
    add_certificate(certificate.get(), &facts);
  }
  ::ERR_clear_error();
  return facts;
}

CertificateFacts shown_certificate(const std::string& text) {
  CertificateFacts facts{.option = text};
  const auto endpoint = parse_endpoint(text);
  if (endpoint.has_error()) {
    facts.trouble = endpoint.error().message();
    return facts;
  }
  const UniqueFd fd(connect_to_server(endpoint.value()));
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(::SSL_CTX_new(::TLS_client_method()),
                                                             &::SSL_CTX_free);
  const std::unique_ptr<SSL, void (*)(SSL*)> session(::SSL_new(context.get()), &::SSL_free);
  ::SSL_set_tlsext_host_name(session.get(), endpoint.value().host.c_str());
  if (fd.get() >= 0 && ::SSL_set_fd(session.get(), fd.get()) == 1)
    (void)::SSL_connect(
        session.get());  // one that wants ours refuses it after having shown its own
  ::ERR_clear_error();
  if (const X509* certificate = ::SSL_get0_peer_certificate(session.get())) {
    add_certificate(certificate, &facts);
  } else {
    facts.trouble = text + " has shown no certificate";
  }
  return facts;
}

}  // namespace ptc::cli
