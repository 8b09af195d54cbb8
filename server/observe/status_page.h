// The status page, for a person who opens the metrics port in a browser: the pool, the queue, what runs, and
// where the ranks' time went in the last prefill. It loads nothing from outside and changes nothing.
//
//     GET /             the page (status_page.html), which draws
//     GET /status.json  what StatusJson says
//     GET /last_prefill.svg  its plan, and the timeline of one layer as it was measured
#ifndef MESHFILL_SERVER_OBSERVE_STATUS_PAGE_H_
#define MESHFILL_SERVER_OBSERVE_STATUS_PAGE_H_

#include <functional>
#include <string>
#include <vector>

#include "meshfill/v1/prefill.pb.h"
#include "server/observe/http_pages.h"
#include "server/observe/last_prefill.h"

namespace meshfill {

extern const char kStatusPageHtml[];

// {"pool": all fields of v1.PoolStatus, "last_prefill": null, or tokens, seconds, MFU, plan, and each rank's
// seconds}, as docs/schemas/status.json has it.
std::string StatusJson(const v1::PoolStatus& pool, const PrefillReport* last);

// The page, its JSON and its picture; /readyz for load balancers: 200 while the server takes prefills.
// `pool_status` and `last_prefill` outlive the pages; both are asked from the pages' threads.
std::vector<HttpPage> StatusPages(const std::function<v1::PoolStatus()>& pool_status,
                                  const LastPrefill& last_prefill);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_STATUS_PAGE_H_
