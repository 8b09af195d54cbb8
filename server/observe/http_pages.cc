#include "server/observe/http_pages.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "civetweb.h"
#include "kernels/return_if_error.h"
#include "server/config/address.h"

namespace meshfill {
namespace {

// Pages need nothing from outside, may not be framed, and are as old as the moment they were made.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:\r\n"
    "Connection: close\r\n";

void Answer(mg_connection* connection, absl::string_view status, absl::string_view content_type,
            absl::string_view body, bool with_body) {
  const std::string head = absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", content_type,
                                        "\r\nContent-Length: ", body.size(), "\r\n", kHeaders, "\r\n");
  mg_write(connection, head.data(), head.size());
  if (with_body) mg_write(connection, body.data(), body.size());
}

}  // namespace

class HttpPages::Server {
 public:
  explicit Server(std::vector<HttpPage> pages) : pages_(std::move(pages)) {}
  ~Server() {
    if (context_ != nullptr) mg_stop(context_);
  }

  // The port, or 0 where `address` cannot be bound.
  uint16_t Start(const std::string& address) {
    const char* options[] = {"listening_ports",    address.c_str(), "num_threads", "4",
                             "request_timeout_ms", "5000",          nullptr};
    const mg_callbacks callbacks{};
    context_ = mg_start(&callbacks, nullptr, options);
    if (context_ == nullptr) return 0;
    mg_set_request_handler(context_, "/", &Server::OnRequest, this);
    mg_server_port port{};
    return mg_get_server_ports(context_, 1, &port) == 1 ? static_cast<uint16_t>(port.port) : 0;
  }

 private:
  static int OnRequest(mg_connection* connection, void* server) {
    const mg_request_info& request = *mg_get_request_info(connection);
    return static_cast<Server*>(server)->Handle(connection, request.request_method, request.local_uri);
  }

  int Handle(mg_connection* connection, absl::string_view method, absl::string_view path) const {
    constexpr int kHandled = 1;
    const bool head = method == "HEAD";
    if (!head && method != "GET") {
      Answer(connection, "405 Method Not Allowed", "text/plain", "only GET is served here\n", true);
      return kHandled;
    }
    const auto page = std::find_if(pages_.begin(), pages_.end(),
                                   [path](const HttpPage& each) { return each.path == path; });
    if (page == pages_.end()) {
      Answer(connection, "404 Not Found", "text/plain", "no such page; see / and /metrics\n", !head);
      return kHandled;
    }
    const bool healthy = page->healthy == nullptr || page->healthy();
    Answer(connection, healthy ? "200 OK" : "503 Service Unavailable", page->content_type, page->body(),
           !head);
    return kHandled;
  }

  const std::vector<HttpPage> pages_;
  mg_context* context_ = nullptr;
};

HttpPages::HttpPages(std::unique_ptr<Server> server, std::string address)
    : server_(std::move(server)), address_(std::move(address)) {}
HttpPages::~HttpPages() = default;

absl::StatusOr<std::unique_ptr<HttpPages>> HttpPages::Listen(const std::string& address,
                                                             std::vector<HttpPage> pages) {
  ASSIGN_OR_RETURN(auto resolved, ResolveFreeAddress(address));
  auto server = std::make_unique<Server>(std::move(pages));
  resolved.port = server->Start(resolved.DebugString());
  if (resolved.port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot serve pages on ", address, "; choose another port"));
  }
  return std::unique_ptr<HttpPages>(new HttpPages(std::move(server), resolved.DebugString()));
}

}  // namespace meshfill
