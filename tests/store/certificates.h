// A private authority and certificates of nodes, made with the openssl program.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "store/rpc/credentials.h"
#include "temp_dir.h"

namespace ptc {

class Authority {
 public:
  static bool possible() { return std::system("command -v openssl > /dev/null") == 0; }

  Authority() {
    openssl(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /O=ca "
        "-keyout ca.key -out ca.pem");
  }
  /// Files for `node`; its certificate names `name`.
  PeerAuth issue(const std::string& node, const std::string& name) {
    std::ofstream(dir_.file("names")) << "subjectAltName = DNS:" << name << "\n";
    openssl(
        fmt::format("req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={0} "
                    "-keyout {0}.key -out {0}.csr",
                    node));
    openssl(
        fmt::format("x509 -req -in {0}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
                    "-extfile names -out {0}.pem",
                    node));
    ::chmod(file(node + ".key").c_str(), 0600);
    return {.ca_file = file("ca.pem"),
            .cert_file = file(node + ".pem"),
            .key_file = file(node + ".key")};
  }
  PeerAuth issue(const std::string& node) { return issue(node, node); }
  std::string file(const std::string& name) const { return dir_.file(name); }

 private:
  void openssl(const std::string& arguments) {
    const std::string command =
        fmt::format("cd {} && openssl {} 2> /dev/null", dir_.file("."), arguments);
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
  TempDir dir_;
};

}  // namespace ptc
