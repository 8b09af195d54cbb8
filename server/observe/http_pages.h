// Serves a few pages over HTTP, each made anew for every GET: /metrics and the status page. Longer ones are
// sent as gzip to clients that accept it.
//
// For people and scrapers inside the cluster: no encryption, no log-in, nothing that changes state.
#ifndef MESHFILL_SERVER_OBSERVE_HTTP_PAGES_H_
#define MESHFILL_SERVER_OBSERVE_HTTP_PAGES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/observe/metrics_format.h"

namespace meshfill {

struct HttpPage {
  std::string path;  // exactly, e.g. "/metrics"
  std::string content_type;
  std::function<std::string()> body;                    // called from the server's thread, one at a time
  std::function<bool()> healthy = nullptr;              // false: answers 503 instead of 200; null: never
  std::function<std::string()> open_metrics = nullptr;  // for clients that would rather have it; null: none
};

// /metrics, whose text is in the format that the client prefers.
HttpPage MetricsPage(const std::function<std::string(MetricsFormat)>& text);

class HttpPages {
 public:
  // Listens on `address` (HOST:PORT, port 0: any) until destroyed. UNAVAILABLE where it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpPages>> Listen(const std::string& address,
                                                           std::vector<HttpPage> pages);
  ~HttpPages();  // waits for the answers that are under way

  const std::string& address() const { return address_; }  // HOST:PORT, the real port

 private:
  class Server;  // keeps the HTTP library's headers out of this one
  HttpPages(std::unique_ptr<Server> server, std::string address);

  std::unique_ptr<Server> server_;
  std::string address_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_HTTP_PAGES_H_
