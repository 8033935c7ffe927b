//! A buffer that tasks fill at the same time, each its own rows.

use std::marker::PhantomData;

/// A buffer that tasks may fill at the same time.
pub(super) struct Shared<'a, R> {
    start: *mut R,
    len: usize,
    buffer: PhantomData<&'a mut [R]>,
}

// SAFETY: it stands for a `&mut [R]`, which may be sent; what several threads do with one is the promise
// of those who call `rows`.
#[allow(unsafe_code)]
unsafe impl<R: Send> Send for Shared<'_, R> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<R: Send> Sync for Shared<'_, R> {}

impl<'a, R> Shared<'a, R> {
    pub(super) fn new(buffer: &'a mut [R]) -> Self {
        Self { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// `count` rows of `width` numbers, the first at `first`, the next ones `stride` further each.
    /// # Panics
    /// If they reach beyond the buffer.
    /// # Safety
    /// No two of the rows that are alive at one time overlap.
    #[allow(unsafe_code)]
    pub(super) unsafe fn rows(
        &self,
        (first, [count, stride, width]): (usize, [usize; 3]),
    ) -> RowsMut<'_, R> {
        let end = first + count.saturating_sub(1) * stride + width;
        assert!(count == 0 || end <= self.len, "rows within the buffer");
        RowsMut { shared: self, first, count, stride, width }
    }
}

/// Rows of a buffer that one task fills.
pub(super) struct RowsMut<'a, R> {
    shared: &'a Shared<'a, R>,
    first: usize,
    count: usize,
    stride: usize,
    width: usize,
}

impl<R> RowsMut<'_, R> {
    /// Where the first row begins.
    pub(super) fn start(&mut self) -> *mut R {
        // SAFETY: `rows` has checked that the first row is within the buffer.
        #[allow(unsafe_code)]
        unsafe {
            self.shared.start.add(self.first)
        }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn at(&mut self, i: usize) -> &mut [R] {
        assert!(i < self.count, "row {i} of {}", self.count);
        // SAFETY: `rows` has checked that all rows are within the buffer, and its caller that nobody else
        // has any part of them; the borrow of `self` keeps this from giving two at once.
        #[allow(unsafe_code)]
        unsafe {
            let start = self.shared.start.add(self.first + i * self.stride);
            std::slice::from_raw_parts_mut(start, self.width)
        }
    }
}

/// Rows of a buffer that is read.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, R> {
    data: &'a [R],
    stride: usize,
    width: usize,
}

impl<'a, R> Rows<'a, R> {
    /// Rows of `width` numbers, the first at `first`, the next ones `stride` further each.
    pub(super) fn new(data: &'a [R], first: usize, [stride, width]: [usize; 2]) -> Self {
        Self { data: &data[first..], stride, width }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn at(&self, i: usize) -> &'a [R] {
        &self.data[i * self.stride..][..self.width]
    }
}
