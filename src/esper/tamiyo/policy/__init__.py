"""What a policy sees and may do: observations, masks, and the masked distribution."""
