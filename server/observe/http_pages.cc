#include "server/observe/http_pages.h"

#include <microhttpd.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/config/address.h"
#include "server/observe/gzip.h"

namespace meshfill {
namespace {

// Pages need nothing from outside, may not be framed, and are as old as the moment they were made.
constexpr const char* kHeaders[][2] = {
    {"Cache-Control", "no-store"},
    {"X-Content-Type-Options", "nosniff"},
    {"X-Frame-Options", "DENY"},
    {"Content-Security-Policy",
     "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src "
     "'self' data:"},
    {"Connection", "close"}};
constexpr absl::Duration kLongestConnection = absl::Seconds(10);  // from accept to the answer's last byte
constexpr unsigned kMostConnections = 256;
constexpr size_t kCrowd = 192;        // from so many connections on, a newcomer takes the oldest one's place
constexpr size_t kPackedFrom = 1024;  // bytes of a body; less is sent as it is
constexpr unsigned kMaxHeadBytes = 16 << 10;

}  // namespace

// One thread serves all connections: none waits for another, however slowly it sends or reads.
class HttpPages::Server {
 public:
  explicit Server(std::vector<HttpPage> pages) : pages_(std::move(pages)) {}
  ~Server() {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  // The port, or 0 where `address` cannot be bound.
  uint16_t Start(const HostPort& address) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST;
    addrinfo* found = nullptr;
    const std::string port = std::to_string(address.port);
    if (getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found) != 0) return 0;
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
    const unsigned family = found->ai_family == AF_INET6 ? MHD_USE_IPv6 : MHD_NO_FLAG;
    daemon_ = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ITC | family, 0, nullptr, nullptr, &Server::OnRequest,
        this,                                                                                             //
        MHD_OPTION_NOTIFY_CONNECTION, &Server::OnConnection, this, MHD_OPTION_SOCK_ADDR, found->ai_addr,  //
        MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u,                                                           //
        MHD_OPTION_CONNECTION_LIMIT, kMostConnections,                                                    //
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, size_t{kMaxHeadBytes}, MHD_OPTION_CONNECTION_TIMEOUT,
        static_cast<unsigned>(absl::ToInt64Seconds(kLongestConnection)), MHD_OPTION_END);
    if (daemon_ == nullptr) return 0;
    const MHD_DaemonInfo* info = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT);
    return info == nullptr ? 0 : info->port;
  }

 private:
  struct Connection {
    int fd;
    absl::Time begin;
  };

  static void OnConnection(void* server, MHD_Connection* connection, void**,
                           MHD_ConnectionNotificationCode code) {
    auto& connections = static_cast<Server*>(server)->connections_;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      connections.erase(connection);
      return;
    }
    const absl::Time now = MonotonicNow();
    auto oldest = connections.end();
    for (auto entry = connections.begin(); entry != connections.end(); ++entry) {
      if (entry->second.begin + kLongestConnection < now) shutdown(entry->second.fd, SHUT_RDWR);
      if (oldest == connections.end() || entry->second.begin < oldest->second.begin) oldest = entry;
    }
    if (connections.size() >= kCrowd) shutdown(oldest->second.fd, SHUT_RDWR);
    const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != nullptr) connections[connection] = {info->connect_fd, now};
  }

  static MHD_Result OnRequest(void* server, MHD_Connection* connection, const char* path, const char* method,
                              const char*, const char*, size_t* upload_bytes, void** state) {
    // The first call is for the headers alone; a body is read to its end, and thrown away.
    static char asked;
    if (*state == nullptr) {
      *state = &asked;
      return MHD_YES;
    }
    if (*upload_bytes > 0) {
      *upload_bytes = 0;
      return MHD_YES;
    }
    return static_cast<Server*>(server)->Handle(connection, method, path);
  }

  MHD_Result Handle(MHD_Connection* connection, absl::string_view method, absl::string_view path) const {
    if (method != "HEAD" && method != "GET") {
      return Answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", "only GET is served here\n");
    }
    const auto page = std::find_if(pages_.begin(), pages_.end(),
                                   [path](const HttpPage& each) { return each.path == path; });
    if (page == pages_.end()) {
      return Answer(connection, MHD_HTTP_NOT_FOUND, "text/plain", "no such page; see / and /metrics\n");
    }
    const bool healthy = page->healthy == nullptr || page->healthy();
    const unsigned status = healthy ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE;
    if (page->open_metrics != nullptr &&
        PreferredFormat(HeaderOf(connection, MHD_HTTP_HEADER_ACCEPT)) == MetricsFormat::kOpenMetrics) {
      return Answer(connection, status, ContentTypeOf(MetricsFormat::kOpenMetrics), page->open_metrics());
    }
    return Answer(connection, status, page->content_type, page->body());
  }

  // Empty where the request has no such header.
  static absl::string_view HeaderOf(MHD_Connection* connection, const char* name) {
    return absl::NullSafeStringView(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name));
  }

  // The library leaves the body out where the method is HEAD.
  static MHD_Result Answer(MHD_Connection* connection, unsigned status, const std::string& content_type,
                           const std::string& body) {
    const absl::string_view accepted = HeaderOf(connection, MHD_HTTP_HEADER_ACCEPT_ENCODING);
    std::string packed;
    if (body.size() >= kPackedFrom && AcceptsGzip(accepted)) packed = Gzip(body);
    const std::string& sent = packed.empty() ? body : packed;
    MHD_Response* const response =
        MHD_create_response_from_buffer(sent.size(), const_cast<char*>(sent.data()), MHD_RESPMEM_MUST_COPY);
    MHD_add_response_header(response, "Content-Type", content_type.c_str());
    MHD_add_response_header(response, "Vary", "Accept, Accept-Encoding");
    if (!packed.empty()) MHD_add_response_header(response, "Content-Encoding", "gzip");
    for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
    const MHD_Result queued = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return queued;
  }

  const std::vector<HttpPage> pages_;
  std::map<MHD_Connection*, Connection> connections_;  // used by the daemon's thread alone
  MHD_Daemon* daemon_ = nullptr;
};

HttpPage MetricsPage(const std::function<std::string(MetricsFormat)>& text) {
  return {.path = "/metrics",
          .content_type = ContentTypeOf(MetricsFormat::kPrometheus),
          .body = [text] { return text(MetricsFormat::kPrometheus); },
          .open_metrics = [text] { return text(MetricsFormat::kOpenMetrics); }};
}

HttpPages::HttpPages(std::unique_ptr<Server> server, std::string address)
    : server_(std::move(server)), address_(std::move(address)) {}
HttpPages::~HttpPages() = default;

absl::StatusOr<std::unique_ptr<HttpPages>> HttpPages::Listen(const std::string& address,
                                                             std::vector<HttpPage> pages) {
  ASSIGN_OR_RETURN(auto resolved, ResolveFreeAddress(address));
  auto server = std::make_unique<Server>(std::move(pages));
  resolved.port = server->Start(resolved);
  if (resolved.port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot serve pages on ", address, "; choose another port"));
  }
  return std::unique_ptr<HttpPages>(new HttpPages(std::move(server), resolved.DebugString()));
}

}  // namespace meshfill
