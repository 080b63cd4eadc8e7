#include "core/arena/chunk_list.h"

namespace waterflow {

ChunkList::ChunkList(std::size_t capacity) {
  head_ = tail_ = new_record();
  records_[head_].bytes = capacity;
  rebuild_index();
}

Index ChunkList::new_record() {
  ++size_;
  if (spare_.empty()) {
    records_.emplace_back();
    return static_cast<Index>(records_.size() - 1);
  }
  const Index index = spare_.back();
  spare_.pop_back();
  records_[index] = Record{};
  return index;
}

void ChunkList::link_after(Index chunk, Index added) {
  const Index above = records_[chunk].next;
  records_[added].prev = chunk;
  records_[added].next = above;
  records_[chunk].next = added;
  (above == kNone ? tail_ : records_[above].prev) = added;
}

Index ChunkList::split(Index chunk, std::size_t bytes) {
  const Index rest = new_record();  // may move the records: no reference before this line
  Record& low = records_[chunk];
  Record& high = records_[rest];
  high.offset = low.offset + bytes;
  high.bytes = low.bytes - bytes;
  high.users = low.users;
  high.epoch = low.epoch;
  high.lane = low.lane;
  high.state = low.state;
  low.bytes = bytes;
  link_after(chunk, rest);
  index_start(rest);
  return rest;
}

void ChunkList::absorb_next(Index chunk) {
  const Index gone = records_[chunk].next;
  unindex_start(gone);
  const Index above = records_[gone].next;
  records_[chunk].bytes += records_[gone].bytes;
  records_[chunk].next = above;
  (above == kNone ? tail_ : records_[above].prev) = chunk;
  spare_.push_back(gone);
  --size_;
}

void ChunkList::stretch_tail(std::size_t capacity) {
  records_[tail_].bytes = capacity - records_[tail_].offset;
  rebuild_index();
}

void ChunkList::append(std::size_t bytes) {
  const std::size_t offset = capacity();
  const Index added = new_record();
  records_[added].offset = offset;
  records_[added].bytes = bytes;
  link_after(tail_, added);
  rebuild_index();
}

void ChunkList::drop_tail() {
  spare_.push_back(tail_);
  --size_;
  tail_ = records_[tail_].prev;
  records_[tail_].next = kNone;
  rebuild_index();
}

void ChunkList::rebuild_index() {
  region_shift_ = 0;
  while (((capacity() - 1) >> region_shift_) >= kRegions) ++region_shift_;
  first_in_region_.assign(kRegions, kNone);
  used_regions_.fill(0);
  used_words_ = 0;
  for (Index chunk = head_; chunk != kNone; chunk = records_[chunk].next) index_start(chunk);
}

void ChunkList::index_start(Index chunk) {
  const Index region = region_of(records_[chunk].offset);
  Index& first = first_in_region_[region];
  if (first != kNone && records_[first].offset < records_[chunk].offset) return;
  first = chunk;
  used_regions_[region / 64] |= std::uint64_t{1} << (region % 64);
  used_words_ |= std::uint64_t{1} << (region / 64);
}

void ChunkList::unindex_start(Index chunk) {
  const Index region = region_of(records_[chunk].offset);
  if (first_in_region_[region] != chunk) return;
  const Index above = records_[chunk].next;
  if (above != kNone && region_of(records_[above].offset) == region) {
    first_in_region_[region] = above;
    return;
  }
  first_in_region_[region] = kNone;
  used_regions_[region / 64] &= ~(std::uint64_t{1} << (region % 64));
  if (used_regions_[region / 64] == 0) used_words_ &= ~(std::uint64_t{1} << (region / 64));
}

Index ChunkList::first_start_above(Index region) const {
  const Index word = region / 64;
  // The double shift keeps a shift by 64 defined: nothing lies above the word's last bit.
  const std::uint64_t in_word = used_regions_[word] >> (region % 64) >> 1;
  if (in_word != 0) return first_in_region_[region + 1 + __builtin_ctzll(in_word)];
  const std::uint64_t words = used_words_ >> word >> 1;
  if (words == 0) return kNone;
  const Index next = word + 1 + __builtin_ctzll(words);
  return first_in_region_[next * 64 + __builtin_ctzll(used_regions_[next])];
}

Index ChunkList::containing(std::size_t offset) const {
  const Index region = region_of(offset);
  Index chunk = first_in_region_[region];
  if (chunk == kNone) {
    const Index above = first_start_above(region);
    return above == kNone ? tail_ : records_[above].prev;
  }
  if (records_[chunk].offset > offset) return records_[chunk].prev;
  while (records_[chunk].end() <= offset) chunk = records_[chunk].next;
  return chunk;
}

}  // namespace waterflow
